"""Measures how good recent predictions were, and whether they were better than none."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import LengthDistribution

# The number of answers that decides whether predictions are used.
WINDOW = 500
# With fewer answers, the figures say nothing.
LEAST_TO_TELL = 50


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction of an answer's length before the answer began.

    said: the prediction for this prompt; None if there was none. blind: the distribution of all
        lengths at that time, which ignores the prompt.
    """

    said: LengthDistribution | None = None
    blind: LengthDistribution | None = None


class RollingQuality:
    """Scores the predictions of the last WINDOW answers that ended by themselves, neither cut nor
    aborted.

    widened: whether predictions were worse (by CRPS) than the distribution of all lengths over
        WINDOW answers, and have not been better over WINDOW answers since. If so, requests get that
        distribution. Predictions are still made and scored.
    """

    def __init__(self) -> None:
        self.widened = False
        # The predicted mean, the answer's length, both CRPS, and whether the length was in the
        # central 80 %.
        self._scored = deque[tuple[float, ...]](maxlen=WINDOW)
        # The number of answers since `widened` last changed.
        self._num_since = 0

    def add(self, forecast: Forecast, output_tokens: int) -> bool:
        """Count an answer that ended by itself. Return whether this changes `widened`."""
        said, blind = forecast.said, forecast.blind
        if said is None or blind is None:
            return False
        within_80 = said.has_within(output_tokens, 0.8)
        errors = said.crps(output_tokens), blind.crps(output_tokens)
        self._scored.append((said.mean(), output_tokens, *errors, within_80))
        self._num_since += 1
        if self._num_since < WINDOW:
            return False
        _, _, crps, blind_crps, _ = np.array(self._scored, float).T
        # A few long answers dominate the sum, and any client can ask for long answers. So
        # predictions must also be worse if each answer has the same weight.
        excess = np.array([(crps - blind_crps).sum(), _shares(crps, blind_crps).sum()])
        changes = bool((excess < 0).any() if self.widened else (excess > 0).all())
        if changes:
            self.widened = not self.widened
            self._num_since = 0
        return changes

    def summary(self) -> dict[str, Any]:
        """Return the number of answers, the mean CRPS in tokens, the share of CRPS saved compared
        with the blind distribution, the share of answers in the central 80 %, and Spearman's rho of
        predicted means and lengths."""
        scored = self._scored
        if not scored:
            return {"widened": self.widened, "num_answers": 0}
        means, lengths, crpss, blinds, within = np.array(scored, float).T
        crps, blind = float(crpss.mean()), float(blinds.mean())
        return {
            "widened": self.widened,
            "num_answers": len(scored),
            "crps": round(crps, 2),
            "blind_crps": round(blind, 2),
            "crps_gain": round(1 - crps / blind, 3) if blind > 0 else 0.0,
            "within_80": round(float(within.mean()), 3),
            "spearman": round(spearman(means, lengths), 3),
        }


def _shares(crps: NDArray[np.float64], blind_crps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much worse each prediction was than the blind one, from -1 (it was perfect) to 1
    (the blind one was)."""
    return np.asarray((crps - blind_crps) / np.maximum(crps + blind_crps, 1e-9), np.float64)


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation; 0 if either array is constant. Equal values share their
    mean rank."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, of, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[of]
    return middle
