"""Scores of a probe for answers of which there are no hidden states, drawn by their true lengths.

All that is drawn is drawn before a run, and no score is shown before its age is reached. How far
off a probe is at one token it mostly is at the next too: its error is AR(1) over age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from predictor_store.probe.probe_training import BAND_AGES, RECIPES, base_rates
from sage_sched.probe.posterior import Reading
from sage_sched.probe.refining import from_steps, in_steps

Floats = NDArray[np.float64]
# Our choice: after so many tokens an error is forgotten to a share of 1/e.
MEMORY_TOKENS = 32.0
# Of a bin's lengths, as many stand for it.
_PER_BIN = 4


def errors(num_tokens: int, rng: np.random.Generator) -> Floats:
    """One for each age of an answer, each standard normal, shape (num_tokens,)."""
    keeps = math.exp(-1 / MEMORY_TOKENS)
    drawn = rng.normal(size=num_tokens)
    for age in range(1, num_tokens):
        drawn[age] = keeps * drawn[age - 1] + math.sqrt(1 - keeps**2) * drawn[age]
    return drawn


def reading_of(recipe: str, lengths: NDArray[np.int64]) -> Reading:
    """The bins of a recipe of predictor_store.probe.probe_training, and how often each is so for
    answers of these lengths, at every age."""
    edges = RECIPES[recipe].edges(int(lengths.max()))
    ages = np.concatenate([np.arange(length) for length in lengths])
    left = np.repeat(lengths, lengths) - ages
    bins = np.searchsorted(edges, left, side="left") - 1
    return Reading(edges, BAND_AGES, base_rates(bins, ages, edges.size - 1, BAND_AGES))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Sees ln(what is left) with a normal error, knows how large such errors are, and how often
    each length is so: its scores are what Bayes' rule makes of that.

    spread: the error's standard deviation. longest: of all answers, tokens.
    """

    reading: Reading
    spread: float
    longest: int

    def __call__(self, length: int, drawn: Floats) -> Floats:
        """ln P by bin at each age of an answer, shape (length, bins); drawn: see errors."""
        ages = np.arange(length)
        seen = np.log(length - ages) + self.spread * drawn
        edges = np.append(self.reading.edges[:-1], max(self.longest, self.reading.edges[-2] + 1))
        share = (np.arange(_PER_BIN) + 0.5) / _PER_BIN
        inside = np.log(edges[:-1, None] + share * np.diff(edges)[:, None] + 0.5)
        off = (seen[:, None, None] - inside) / self.spread
        likelihood = np.logaddexp.reduce(-(off**2) / 2, axis=2)
        band = np.searchsorted(self.reading.band_ages, ages, side="right") - 1
        return from_steps(in_steps(likelihood + self.reading.log_base[band]))


class Replayed:
    """A probe's scores of other answers, at ages of the same band at which as much was left (by
    bin). The better its error, the higher it puts the true bin."""

    def __init__(self, reading: Reading, lengths: Sequence[int], scores: Sequence[Floats]) -> None:
        """scores: of each answer, ln P by bin at each of its ages."""
        self._reading = reading
        found: dict[tuple[int, int], list[Floats]] = {}
        for length, rows in zip(lengths, scores, strict=True):
            band, true = self._places(length)
            for age, row in enumerate(rows[:length]):
                found.setdefault((int(band[age]), int(true[age])), []).append(row)
        self._rows = {
            (band, true): np.array(sorted(rows, key=lambda row, b=true: float(row[b])))  # type: ignore[misc]
            for (band, true), rows in found.items()
        }

    def _places(self, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ages = np.arange(length)
        band = np.searchsorted(self._reading.band_ages, ages, side="right") - 1
        return band, np.searchsorted(self._reading.edges, length - ages, side="left") - 1

    def __call__(self, length: int, drawn: Floats) -> Floats:
        """As LogNormal."""
        share = ndtr(drawn)
        found = []
        for band, true, at in zip(*self._places(length), share, strict=True):
            key = (int(band), int(true))
            if key not in self._rows:
                key = self._nearest(*key)
            rows = self._rows[key]
            found.append(rows[min(int(at * len(rows)), len(rows) - 1)])
        return np.array(found)

    def _nearest(self, band: int, true: int) -> tuple[int, int]:
        """Of the places that there is a score of: first by bin, then by band."""
        return min(self._rows, key=lambda other: (abs(other[1] - true), abs(other[0] - band)))


def spread_of(ratio: float, lengths: NDArray[np.int64], prompt_means: Floats) -> float:
    """The spread with which what is left, as it is seen, is off by `ratio` times less, on average
    over all tokens of these answers, than the prompt's mean less the age (TRAIL's measure: 2.66).
    """
    left = [length - np.arange(length) for length in lengths]
    of_prompt = [
        np.abs(np.maximum(mean - np.arange(length), 1) - rest)
        for length, mean, rest in zip(lengths, prompt_means, left, strict=True)
    ]
    wanted = np.concatenate(of_prompt).mean() / ratio / np.concatenate(left).mean()
    normal = np.random.default_rng(0).normal(size=100_000)
    low, high = 1e-3, 4.0
    for _ in range(40):
        spread = (low + high) / 2
        too_far = np.abs(np.expm1(spread * normal)).mean() > wanted
        low, high = (low, spread) if too_far else (spread, high)
    return spread
