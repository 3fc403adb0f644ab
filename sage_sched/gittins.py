"""The Gittins index of an answer whose length is known as a distribution only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sage_sched.index_table import IndexTable


class GittinsTable(IndexTable):
    """The Gittins index at every refresh boundary.

    With X the request's cost, the index at age a is `inf over D > a of
    E[min(X, D) - a | X > a] / P(X <= D | X > a)`: the least cost per completion that is to be had
    by going on from a (SageSched, section 3.3; Gittins 1989). The infimum is reached at an atom
    of X.
    """

    __slots__ = ()

    def _computed(self, weights: NDArray[np.float64], costs: NDArray[np.float64]) -> float:
        done = weights.cumsum()
        # Summed from the right, the probability of outliving an atom keeps its precision in the
        # tail, where it counts.
        outlives = weights[::-1].cumsum()[::-1]
        spent = (weights * costs).cumsum()
        spent[:-1] += outlives[1:] * costs[:-1]
        return float((spent / done).min())
