"""Measures of a predicted distribution against the length that came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from sage_sched.distribution import LengthDistribution

_NUM_RESAMPLED = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prediction and what came.

    crps: tokens, see LengthDistribution.crps.
    pit: where in the distribution the length fell, 0 to 1, uniform in the probability of its own
        atom, so that good predictions give a uniform one.
    central_50, central_80: whether it fell into the central interval, both ends counted.
    pinball_90: tokens, at the quantile 0.9.
    """

    prompt: str
    length: int
    mean: float
    crps: float
    pit: float
    central_50: bool
    central_80: bool
    pinball_90: float


def outcome(
    prompt: str, predicted: LengthDistribution, length: int, rng: np.random.Generator
) -> Outcome:
    below = float(predicted.weights[predicted.lengths < length].sum())
    at = float(predicted.weights[predicted.lengths == length].sum())
    q90 = predicted.quantile(0.9)
    return Outcome(
        prompt,
        length,
        predicted.mean(),
        predicted.crps(length),
        below + at * float(rng.random()),
        predicted.has_within(length, 0.5),
        predicted.has_within(length, 0.8),
        0.9 * (length - q90) if length > q90 else 0.1 * (q90 - length),
    )


@dataclass(frozen=True, slots=True)
class Quality:
    """Of all outcomes of a predictor; gain: the share of the CRPS of knowing no prompt that it
    saves, with the interval that 95 % of resamples (of prompts) lie in."""

    gain: float
    gain_low: float
    gain_high: float
    crps: float
    central_50: float
    central_80: float
    pinball_90: float
    spearman: float
    pit: tuple[float, ...]  # shares of ten equal bins


def quality(outcomes: Sequence[Outcome], blind: Sequence[Outcome]) -> Quality:
    """blind: of the distribution of all past lengths, for the same prompts in the same order."""
    ours = np.array([o.crps for o in outcomes])
    theirs = np.array([o.crps for o in blind])
    _, prompt = np.unique([o.prompt for o in outcomes], return_inverse=True)
    low, high = _interval(np.bincount(prompt, ours), np.bincount(prompt, theirs))
    lengths = np.array([o.length for o in outcomes])
    rho = spearmanr([o.mean for o in outcomes], lengths).statistic
    pit = np.histogram([o.pit for o in outcomes], bins=10, range=(0, 1))[0] / len(outcomes)
    return Quality(
        float(1 - ours.sum() / theirs.sum()),
        low,
        high,
        float(ours.mean()),
        float(np.mean([o.central_50 for o in outcomes])),
        float(np.mean([o.central_80 for o in outcomes])),
        float(np.mean([o.pinball_90 for o in outcomes])),
        0.0 if np.isnan(rho) else float(rho),
        tuple(float(share) for share in pit),
    )


def _interval(ours: NDArray[Any], theirs: NDArray[Any]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(ours), size=(_NUM_RESAMPLED, len(ours)))
    gains = 1 - ours[chosen].sum(1) / theirs[chosen].sum(1)
    return float(np.quantile(gains, 0.025)), float(np.quantile(gains, 0.975))
