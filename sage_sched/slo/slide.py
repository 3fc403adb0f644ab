"""SlideBatching (ProServe, Algorithm 1): the order of one queue, and how long a batch may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats


class Queue(NamedTuple):
    """The running and waiting jobs; arrays of shape (jobs,).

    exec_s: seconds that the next token of each takes, without the fixed time of a batch, above 0.
    remain_s: until it is due; below 0 if it is late.
    density: what a second of serving it is worth.
    """

    exec_s: Floats
    remain_s: Floats
    density: Floats


@dataclass(frozen=True, slots=True)
class Slide:
    """fixed_s: the fixed time of a batch (t_c). least_s: the shortest batch (eta). gamma: the
    larger, the more jobs are urgent."""

    fixed_s: float
    least_s: float
    gamma: float

    def budget_s(self, queue: Queue) -> float:
        """How long a batch may take: until the first token is due. Tokens that can no longer be in
        time do not count (xLLM); inf if none can be."""
        in_time = queue.remain_s >= queue.exec_s + self.fixed_s
        return max(float(queue.remain_s[in_time].min(initial=math.inf)), self.least_s)

    def is_urgent(self, queue: Queue, budget_s: float) -> NDArray[np.bool_]:
        """Which jobs would be late if all others went first (eq. 8)."""
        work_s = float(queue.exec_s.sum())
        if budget_s == math.inf:
            needed_s = work_s
        elif budget_s > self.fixed_s:
            needed_s = budget_s / (budget_s - self.fixed_s) * work_s
        else:
            needed_s = math.inf
        return queue.remain_s < self.gamma * needed_s

    def places(self, queue: Queue, budget_s: float) -> NDArray[np.int64]:
        """The place of each in the order: the urgent by density, then the others by when they are
        due; ties as they come."""
        urgent = self.is_urgent(queue, budget_s)
        order = np.lexsort((np.where(urgent, -queue.density, queue.remain_s), ~urgent))
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return places
