"""From lengths to classes and back: ranges of output length, and the distribution they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from predictor_store.data.warm import Observation
from sage_sched.distribution import LengthDistribution


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Ranges of output length, about as many of the answers in each.

    edges: int64, shape (len(self) - 1,), tokens: the shortest length of each bin but the first.
    lengths: int64, shape (n,), tokens: those of the answers, which are the bins' atoms.
    """

    edges: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return self.edges.size + 1

    @classmethod
    def of(cls, lengths: NDArray[np.int64], num_bins: int) -> Self:
        """At most num_bins; fewer where many lengths are equal. None is empty."""
        shares = np.arange(1, num_bins) / num_bins
        edges = np.unique(np.quantile(lengths, shares, method="inverted_cdf"))
        return cls(edges[edges > lengths.min()], lengths)

    def targets(self, answers: Sequence[Observation]) -> NDArray[np.bool_]:
        """Shape (len(answers), len(self)): the bins that an answer may have ended in, all from its
        length on where it was cut."""
        own = self._bin(np.array([answer.output_tokens for answer in answers]))[:, np.newaxis]
        cut = np.array([answer.censored for answer in answers])[:, np.newaxis]
        bins = np.arange(len(self))
        return np.where(cut, bins >= own, bins == own)

    def distribution(self, probabilities: NDArray[np.float64]) -> LengthDistribution:
        """probabilities: shape (len(self),), above 0."""
        bins = self._bin(self.lengths)
        weights = (probabilities / np.bincount(bins))[bins]
        return LengthDistribution.from_samples(self.lengths, "history", weights)

    def _bin(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.edges, lengths, side="right")
