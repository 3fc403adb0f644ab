"""SlideBatching (ProServe, Algorithm 1): the order of one queue, and how long a batch may take; and
a share of the work for jobs that are late by far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.view import SchedulerView


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
    """fixed_s: the fixed time of a batch (t_c). least_s: the shortest batch (eta)."""

    fixed_s: float
    least_s: float

    def budget_s(self, queue: Queue) -> float:
        """How long a batch may take: until the first token is due. Tokens that can no longer be in
        time do not count (xLLM); inf if none can be."""
        in_time = queue.remain_s >= queue.exec_s + self.fixed_s
        return max(float(queue.remain_s[in_time].min(initial=math.inf)), self.least_s)

    def is_urgent(self, queue: Queue, budget_s: float) -> NDArray[np.bool_]:
        """Which jobs would be late if all others went first (eq. 8, gamma 1)."""
        work_s = float(queue.exec_s.sum())
        if budget_s == math.inf:
            needed_s = work_s
        elif budget_s > self.fixed_s:
            needed_s = budget_s / (budget_s - self.fixed_s) * work_s
        else:
            needed_s = math.inf
        return queue.remain_s < needed_s


def places(queue: Queue, by_density: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The place of each in the order: first those that go by density, such as the urgent, then the
    others by when they are due; ties as they come."""
    order = np.lexsort((np.where(by_density, -queue.density, queue.remain_s), ~by_density))
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order))
    return found


class StarvedShare:
    """Picks the job that goes first, by arrival, as long as the work for such jobs is less than
    their share.

    This is ours. Without a limit, serving them before whatever else is due would make overload last
    (ProServe, section 3.2).

    first: the last pick.
    """

    def __init__(
        self, share: float, pool_tokens: float, is_starved: Callable[[Job, SchedulerView], bool]
    ) -> None:
        """share: of the server's work, in [0, 1). pool_tokens: the most that can be saved up.
        is_starved: asked of ranked jobs without a token."""
        self._share = share
        self._pool_tokens = pool_tokens
        self._credit_tokens = 0.0
        self._served_tokens = 0
        self._is_starved = is_starved
        self.first: Job | None = None

    def choose(self, view: SchedulerView) -> Job | None:
        """The waiting job that goes first; None if none does. Once a pass."""
        first, work = self.first, view.served_tokens - self._served_tokens
        self._served_tokens = view.served_tokens
        # A decode server gives room before it serves.
        if first is not None and (first.served_tokens or first in view.running):
            self._credit_tokens -= first.input_tokens + first.mean_tokens()
            first = None
        earned = self._share * work
        self._credit_tokens = min(self._pool_tokens, self._credit_tokens + earned)
        # The last pick is among these, unless it was aborted, say, or its adapter finds no room.
        starved: list[tuple[int, Job]] = []
        if self._share and (first is not None or self._credit_tokens > 0):
            waiting = enumerate(view.waiting)
            starved = [
                (job.arrival, job)
                for position, job in waiting
                if job.is_ranked
                and not job.generated_tokens
                and self._is_starved(job, view)
                and view.has_adapter(position)
            ]
        if first is None or (first.arrival, first) not in starved:
            first = min(starved)[1] if starved and self._credit_tokens > 0 else None
        self.first = first
        return first
