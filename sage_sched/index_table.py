"""A request's index at every age, computed once for a distribution of its length."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sage_sched.cost import Cost
from sage_sched.distribution import LengthDistribution


class IndexTable(ABC):
    """The index at every refresh boundary, and past the longest length that was seen.

    There samples say nothing. As long as it has been going for, a request is then taken to go on
    for (Lindy's law: the mean residual life of a Pareto tail of exponent 2). Its index so keeps
    rising, it neither keeps a stale good place nor loses every race for ever. The chance of getting
    there, 1 / (samples + 1), is in the table from the start.
    """

    __slots__ = ("_cost", "_indices", "_input_tokens", "_interval_tokens", "_max_tokens")

    def __init__(
        self,
        lengths: LengthDistribution,
        cost: Cost,
        *,
        input_tokens: int,
        max_tokens: int,
        interval_tokens: int,
    ) -> None:
        """max_tokens: the cap on the answer. interval_tokens: distance of the boundaries."""
        self._cost = cost
        self._input_tokens = input_tokens
        self._max_tokens = max_tokens
        self._interval_tokens = interval_tokens
        self._indices = self._computed(lengths.capped(max_tokens))

    def index(self, age_tokens: int) -> float:
        """The index, in units of cost, at the last boundary that age_tokens has reached."""
        interval = age_tokens // self._interval_tokens
        if interval < len(self._indices):
            return self._indices[interval]
        age_tokens = interval * self._interval_tokens
        end_tokens = max(min(2 * age_tokens, self._max_tokens), age_tokens + 1)
        return self._spent(end_tokens) - self._spent(age_tokens)

    @abstractmethod
    def _computed(self, capped: LengthDistribution) -> list[float]:
        """The index at the boundaries 0, 1, 2 ... as far as samples say something."""

    def _spent(self, output_tokens: int) -> float:
        # Nothing is spent before the start, whatever the model charges for the input.
        return self._cost(self._input_tokens, output_tokens) if output_tokens else 0.0
