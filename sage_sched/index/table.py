"""A request's index at any age, from the distribution of its length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sage_sched.cost import Cost
from sage_sched.distribution import LengthDistribution


class IndexTable(ABC):
    """The index at every refresh boundary, and past the longest length that was seen.

    There samples say nothing. As long as it has been going for, a request is then taken to go on
    for (Lindy's law: the mean residual life of a Pareto tail of exponent 2). Its index so keeps
    rising, it neither keeps a stale good place nor loses every race for ever. The chance of getting
    there, 1 / (samples + 1), is in the table from the start.

    Each entry is computed when it is first asked for: most answers reach few boundaries, and a
    thousand waiting requests, ranked anew because costs have changed, need one entry each.

    believes_tail: whether samples are taken to say something up to the end of that tail.
    """

    believes_tail: ClassVar[bool] = False

    __slots__ = (
        "_cached_tokens",
        "_cost",
        "_costs",
        "_input_tokens",
        "_interval",
        "_interval_tokens",
        "_known_tokens",
        "_lengths",
        "_max_tokens",
        "_value",
        "_weights",
    )

    def __init__(
        self,
        lengths: LengthDistribution,
        cost: Cost,
        *,
        input_tokens: int,
        max_tokens: int,
        interval_tokens: int,
        cached_tokens: int = 0,
    ) -> None:
        """max_tokens: the cap on the answer. interval_tokens: distance of the boundaries.
        cached_tokens: see set_cost."""
        self._input_tokens = input_tokens
        self._max_tokens = max_tokens
        self._interval_tokens = interval_tokens
        capped = lengths.capped(max_tokens)
        tailed = capped.with_tail(max_tokens)
        self._known_tokens = int((tailed if self.believes_tail else capped).lengths[-1])
        self._lengths, self._weights = tailed.lengths, tailed.weights
        self.set_cost(cost, cached_tokens)

    def set_cost(self, cost: Cost, cached_tokens: int) -> None:
        """Count by another cost from now on, or with other cached_tokens of the input."""
        self._cost = cost
        self._cached_tokens = cached_tokens
        self._costs: NDArray[np.float64] = cost(self._input_tokens, self._lengths, cached_tokens)
        self._interval = -1
        self._value = 0.0

    def index(self, age_tokens: int) -> float:
        """The index, in units of cost, at the last boundary that age_tokens has reached."""
        interval = age_tokens // self._interval_tokens
        if interval != self._interval:
            self._interval = interval
            self._value = self._at(interval * self._interval_tokens)
        return self._value

    def _at(self, age_tokens: int) -> float:
        if age_tokens >= self._known_tokens:
            end_tokens = max(min(2 * age_tokens, self._max_tokens), age_tokens + 1)
            return self._spent(end_tokens) - self._spent(age_tokens)
        first = int(np.searchsorted(self._lengths, age_tokens, side="right")) if age_tokens else 0
        return self._computed(self._weights[first:], self._costs[first:] - self._spent(age_tokens))

    @abstractmethod
    def _computed(self, weights: NDArray[np.float64], costs: NDArray[np.float64]) -> float:
        """The index of one whose remaining cost is one of these, increasing, with these weights,
        which sum to no particular number."""

    def _spent(self, output_tokens: int) -> float:
        # Nothing is spent before the start, whatever the model charges for the input.
        if not output_tokens:
            return 0.0
        return float(self._cost(self._input_tokens, output_tokens, self._cached_tokens))
