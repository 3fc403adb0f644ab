"""Measures the quality of predictions by the real lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict.quality import spearman

_NUM_RESAMPLED = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prediction and the real length.

    crps: in tokens (see LengthDistribution.crps).
    central_80: whether the length fell into the central interval, including both ends.
    """

    prompt: str
    length: int
    mean: float
    crps: float
    central_80: bool


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of all outcomes of a predictor.

    gain: the share of CRPS saved, compared with the distribution of all past lengths, with a 95 %
        interval over resampled prompts.
    spearman: of predicted means and lengths.
    """

    gain: float
    gain_low: float
    gain_high: float
    crps: float
    central_80: float
    spearman: float


def quality(outcomes: Sequence[Outcome], blind: Sequence[Outcome]) -> Quality:
    """Return the quality of outcomes.

    blind: outcomes of the distribution of all past lengths, for the same prompts in the same order.
    """
    ours = np.array([o.crps for o in outcomes])
    theirs = np.array([o.crps for o in blind])
    _, prompt = np.unique([o.prompt for o in outcomes], return_inverse=True)
    low, high = _interval(np.bincount(prompt, ours), np.bincount(prompt, theirs))
    means, lengths = np.array([(o.mean, o.length) for o in outcomes], float).T
    return Quality(
        float(1 - ours.sum() / theirs.sum()),
        low,
        high,
        float(ours.mean()),
        float(np.mean([o.central_80 for o in outcomes])),
        spearman(means, lengths),
    )


def _interval(ours: NDArray[Any], theirs: NDArray[Any]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(ours), size=(_NUM_RESAMPLED, len(ours)))
    gains = 1 - ours[chosen].sum(1) / theirs[chosen].sum(1)
    return float(np.quantile(gains, 0.025)), float(np.quantile(gains, 0.975))
