"""The Gittins index of an answer whose length is known as a distribution only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sage_sched.index.table import IndexTable


class GittinsTable(IndexTable):
    """The Gittins index at every refresh boundary.

    With X the request's cost, the index at age a is `inf over D > a of
    E[min(X, D) - a | X > a] / P(X <= D | X > a)`: the least cost per completion that is to be had
    by going on from a (SageSched, section 3.3; Gittins 1989). The infimum is reached at an atom
    of X.
    """

    __slots__ = ()

    def _computed(self, weights: NDArray[np.float64], costs: NDArray[np.float64]) -> float:
        return float(gittins_index(weights, costs))


def gittins_index(weights: NDArray[np.float64], costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The index at one age of requests whose remaining costs are one of these, not decreasing, with
    these weights; both of shape (..., atoms), what comes back (...). At an atom of no weight before
    all others a cost may be anything."""
    done = weights.cumsum(axis=-1)
    # Summed from the right, the probability of outliving an atom keeps its precision in the
    # tail, where it counts.
    outlives = weights[..., ::-1].cumsum(axis=-1)[..., ::-1]
    spent = (weights * costs).cumsum(axis=-1)
    spent[..., :-1] += outlives[..., 1:] * costs[..., :-1]
    if done[..., 0].all():
        ratio = spent / done
    else:
        ratio = np.where(done > 0, spent / np.maximum(done, 1e-300), np.inf)
    least: NDArray[np.float64] = ratio.min(axis=-1)
    return least
