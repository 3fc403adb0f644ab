"""The mean remaining cost of an answer, in the place of its Gittins index."""

from __future__ import annotations

import numpy as np

from sage_sched.distribution import LengthDistribution
from sage_sched.index_table import IndexTable


class MeanCost(IndexTable):
    """E[cost at the end - cost at age a | longer than a], at the refresh boundaries."""

    __slots__ = ()

    def _computed(self, capped: LengthDistribution) -> list[float]:
        tailed = capped.with_tail(self._max_tokens)
        costs = np.array([self._cost(self._input_tokens, n) for n in tailed.lengths.tolist()])
        # Summed from the right: of the atoms from each on.
        outlives = np.cumsum(tailed.weights[::-1])[::-1]
        cost_left = np.cumsum((tailed.weights * costs)[::-1])[::-1]
        ages = range(0, int(tailed.lengths[-1]), self._interval_tokens)
        passed = np.searchsorted(tailed.lengths, ages, side="right")
        means = cost_left[passed] / outlives[passed]
        return [mean - self._spent(age) for mean, age in zip(means.tolist(), ages, strict=True)]
