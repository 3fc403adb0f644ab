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

    __slots__ = ("_bucket_tokens", "_cost", "_costs", "_input_tokens", "_max_tokens", "_tailed")

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
        self._tailed = lengths.capped(max_tokens).with_tail(max_tokens)
        self._costs = np.array([cost(input_tokens, int(n)) for n in self._tailed.lengths])

    def index(self, age_tokens: int) -> float:
        """The mean remaining cost at the last boundary that age_tokens has reached."""
        age_tokens -= age_tokens % self._bucket_tokens
        spent = self._cost(self._input_tokens, age_tokens) if age_tokens else 0.0
        longer = self._tailed.lengths > age_tokens
        if longer.any():
            weights = self._tailed.weights[longer]
            return float(self._costs[longer] @ weights / weights.sum()) - spent
        end_tokens = max(min(2 * age_tokens, self._max_tokens), age_tokens + 1)
        return self._cost(self._input_tokens, end_tokens) - spent
