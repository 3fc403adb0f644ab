"""The Gittins index of an answer whose length is known as a distribution only."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from sage_sched.distribution import LengthDistribution
from sage_sched.index_table import IndexTable


class GittinsTable(IndexTable):
    """The Gittins index at every refresh boundary.

    With X the request's cost, the index at age a is `inf over D > a of
    E[min(X, D) - a | X > a] / P(X <= D | X > a)`: the least cost per completion that is to be had
    by going on from a (SageSched, section 3.3; Gittins 1989). The infimum is reached at an atom
    of X. Drawn as points (mean cost spent by stopping at D, probability done at D), it is the
    steepest slope from the point of age a to a later atom, so one pass from right to left, which
    keeps the upper concave hull of the points passed, gives all ages in O(atoms + boundaries).
    """

    __slots__ = ()

    def _computed(self, capped: LengthDistribution) -> list[float]:
        longest_seen = int(capped.lengths[-1])
        tailed = capped.with_tail(self._max_tokens)
        ages = list(range(0, longest_seen, self._interval_tokens))
        return self._hull_pass(tailed.lengths.tolist(), tailed.weights.tolist(), ages)

    def _hull_pass(self, lengths: list[int], weights: list[float], ages: list[int]) -> list[float]:
        # Point i is atom i - 1 reached, point 0 the start. Summed from the right, the probability
        # of outliving a point keeps its precision in the tail, where it counts.
        costs = [0.0, *(self._spent(length) for length in lengths)]
        outlives = list(accumulate(reversed(weights), initial=0.0))[::-1]
        spent = list(
            accumulate(
                (p * (b - a) for p, a, b in zip(outlives, costs, costs[1:], strict=False)),
                initial=0.0,
            )
        )
        indices = [0.0] * len(ages)
        hull: list[_Point] = []
        right = len(lengths)
        for position in range(len(ages) - 1, -1, -1):
            age = ages[position]
            passed = bisect_right(lengths, age)
            while right > passed:
                point = _Point(spent[right], -outlives[right])
                _drop_dominated(hull, point)
                hull.append(point)
                right -= 1
            since = self._spent(age) - costs[passed]
            here = _Point(spent[passed] + outlives[passed] * since, -outlives[passed])
            # What `here` dominates, every point to its left dominates too.
            _drop_dominated(hull, here)
            indices[position] = 1.0 / _slope(here, hull[-1])
        return indices


class _Point(NamedTuple):
    mean_spent: float
    minus_outlives: float


def _slope(left: _Point, right: _Point) -> float:
    return (right.minus_outlives - left.minus_outlives) / (right.mean_spent - left.mean_spent)


def _drop_dominated(hull: list[_Point], point: _Point) -> None:
    """Drop what lies under the hull once `point` is its leftmost; hull[-1] is leftmost now."""
    while len(hull) >= 2 and _slope(point, hull[-1]) <= _slope(hull[-1], hull[-2]):
        hull.pop()
