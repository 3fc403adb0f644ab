"""How good forecasts of what is left of an answer are, by age."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AGES = (0, 1, 4, 16, 64, 256)
# The age, what was left, and what it was foretold to be, with weights.
Forecast = tuple[int, int, NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Score:
    """Over answers, at one age. mae: of the mean, tokens. crps: tokens. covered: of central 80 %
    intervals, the share that held the truth. number: of answers."""

    mae: float
    crps: float
    covered: float
    number: int


Quality = dict[int, Score]


def quality_by_age(forecasts: Iterable[Forecast]) -> Quality:
    """At AGES, as far as there are any."""
    found: dict[int, list[tuple[float, float, bool]]] = {age: [] for age in AGES}
    for age, left, lengths, weights in forecasts:
        if age in found:
            found[age].append(_score(left, lengths, weights))
    quality = {}
    for age, scores in found.items():
        if scores:
            mae, error, covered = np.mean(scores, axis=0).tolist()
            quality[age] = Score(mae, error, covered, len(scores))
    return quality


def _score(
    left: int, lengths: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float, bool]:
    return (
        abs(float(lengths @ weights) - left),
        crps(left, lengths, weights),
        _covered(left, lengths, weights),
    )


def crps(left: float, lengths: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """The continuous ranked probability score: E|X - left| - E|X - X'| / 2, in tokens."""
    below = np.cumsum(weights)
    gaps = np.diff(lengths)
    spread = float(gaps @ (below[:-1] * (1 - below[:-1])))
    return float(np.abs(lengths - left) @ weights) - spread


def _covered(left: int, lengths: NDArray[np.float64], weights: NDArray[np.float64]) -> bool:
    below = np.cumsum(weights)
    low = lengths[np.searchsorted(below, 0.1)]
    high = lengths[min(int(np.searchsorted(below, 0.9)), lengths.size - 1)]
    return bool(low <= left <= high)
