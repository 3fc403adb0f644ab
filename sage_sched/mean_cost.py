"""The mean remaining cost of an answer, in the place of its Gittins index."""

from __future__ import annotations

import numpy as np

from sage_sched.cost import Cost
from sage_sched.distribution import LengthDistribution


class MeanCost:
    """E[cost at the end - cost at age a | longer than a], at the refresh boundaries.

    Past the longest length seen an answer is taken to go on for as long as it has been going, as in
    GittinsTable.
    """

    __slots__ = ("_bucket_tokens", "_cost", "_indices", "_input_tokens", "_max_tokens")

    def __init__(
        self,
        lengths: LengthDistribution,
        cost: Cost,
        *,
        input_tokens: int,
        max_tokens: int,
        bucket_tokens: int,
    ) -> None:
        """max_tokens: the cap on the answer. bucket_tokens: distance of the boundaries."""
        self._cost = cost
        self._input_tokens = input_tokens
        self._max_tokens = max_tokens
        self._bucket_tokens = bucket_tokens
        tailed = lengths.capped(max_tokens).with_tail(max_tokens)
        costs = np.array([cost(input_tokens, n) for n in tailed.lengths.tolist()])
        # Summed from the right: of the atoms from each on.
        outlives = np.cumsum(tailed.weights[::-1])[::-1]
        cost_left = np.cumsum((tailed.weights * costs)[::-1])[::-1]
        ages = range(0, int(tailed.lengths[-1]), bucket_tokens)
        passed = np.searchsorted(tailed.lengths, ages, side="right")
        means = cost_left[passed] / outlives[passed]
        self._indices: list[float] = [
            mean - self._spent(age) for mean, age in zip(means.tolist(), ages, strict=True)
        ]

    def index(self, age_tokens: int) -> float:
        """The mean remaining cost at the last boundary that age_tokens has reached."""
        bucket = age_tokens // self._bucket_tokens
        if bucket < len(self._indices):
            return self._indices[bucket]
        age_tokens = bucket * self._bucket_tokens
        end_tokens = max(min(2 * age_tokens, self._max_tokens), age_tokens + 1)
        return self._spent(end_tokens) - self._spent(age_tokens)

    def _spent(self, output_tokens: int) -> float:
        # Nothing is spent before the start, whatever the model charges for the input.
        return self._cost(self._input_tokens, output_tokens) if output_tokens else 0.0
