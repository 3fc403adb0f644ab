"""Makes predictions of realistic quality for requests without prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import LengthDistribution

NUM_ATOMS = 64
# The minimum, the median and the maximum gain of the default predictor on nine sets of answered
# prompts (docs/predictor.md).
LEAST_GAIN, USUAL_GAIN, MOST_GAIN = 0.03, 0.22, 0.41
_NUM_TRIED = 400
# The minimum and maximum noise, as the standard deviation of a length's logarithm. At the minimum a
# prediction is nearly exact, at the maximum it says nothing.
_LEAST_NOISE, _MOST_NOISE = 0.02, 50.0


class Supposed:
    """Makes predictions of a wanted quality for requests whose lengths are known.

    Noise is added to each true length, and the prediction is Bayes' posterior over all lengths. So
    predictions are calibrated, and one number, the noise, sets their quality. The noise is chosen
    so that they save the wanted share of the CRPS.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        everything = LengthDistribution.from_samples(self._lengths, "prior")
        self._all = everything.compressed(NUM_ATOMS)

    def predictions(self, gain: float, seed: int) -> list[LengthDistribution]:
        """Return predictions in the order of the lengths.

        gain: the share of the CRPS that predictions save, compared with the distribution of all
            lengths, 0 to 1. If no noise saves that much, the smallest noise is used.
        """
        rng = np.random.default_rng([seed, 5])
        shocks = rng.standard_normal(self._lengths.size)
        noise = self._noise_of(gain)
        return [
            self._posterior(int(length), float(shock), noise)
            for length, shock in zip(self._lengths, shocks, strict=True)
        ]

    def _noise_of(self, gain: float) -> float:
        """Return the noise for a gain, by bisection: the gain falls as the noise rises."""
        rng = np.random.default_rng(6)
        tried = rng.choice(self._lengths, min(_NUM_TRIED, self._lengths.size), replace=False)
        shocks = rng.standard_normal(tried.size)
        blind = sum(self._all.crps(int(length)) for length in tried)
        if blind <= 0:
            return _MOST_NOISE
        low, high = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)
        for _ in range(16):
            middle = (low + high) / 2
            said = sum(
                self._posterior(int(length), float(shock), math.exp(middle)).crps(int(length))
                for length, shock in zip(tried, shocks, strict=True)
            )
            low, high = (middle, high) if 1 - said / blind > gain else (low, middle)
        return math.exp(low)

    def _posterior(self, length: int, shock: float, noise: float) -> LengthDistribution:
        logs: NDArray[np.float64] = np.log(self._all.lengths)
        off = (math.log(length) + noise * shock - logs) / noise
        weights = self._all.weights * np.exp(-0.5 * (np.square(off) - np.square(off).min()))
        return LengthDistribution.from_samples(self._all.lengths, "history", weights)
