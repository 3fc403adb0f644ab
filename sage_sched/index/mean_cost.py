"""The mean remaining cost of an answer, in the place of its Gittins index."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sage_sched.index.table import IndexTable


class MeanCost(IndexTable):
    """E[cost at the end - cost at age a | longer than a], at the refresh boundaries."""

    __slots__ = ()
    believes_tail: ClassVar[bool] = True

    def _computed(self, weights: NDArray[np.float64], costs: NDArray[np.float64]) -> float:
        return float(weights @ costs / weights.sum())
