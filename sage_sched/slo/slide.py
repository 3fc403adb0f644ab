"""SlideBatching (ProServe, Algorithm 1): the order of one queue, and how long a batch may take; and
a share of the work for jobs that are late by far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue

# Keys of jobs with a promise: before those of sage, which the others have.
STARVED, _BY_DENSITY, _BY_DEADLINE = -1e300, -3e9, -2e9
_LAST_S = 9e8


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


def keys(queue: Queue, by_density: NDArray[np.bool_]) -> Floats:
    """The key of each: first go those that go by density, such as the urgent, then the others by
    when they are due."""
    by_deadline = _BY_DEADLINE + np.minimum(queue.remain_s, _LAST_S)
    return np.where(by_density, _BY_DENSITY - queue.density, by_deadline)


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

    def forget(self) -> None:
        """Nobody goes first."""
        if self.first is not None:
            self.first.changes()
            self.first = None

    def choose(
        self, candidates: Iterable[Job], view: SchedulerView, line: WaitingQueue
    ) -> Job | None:
        """The waiting job that goes first; None if none does. Once a pass.

        candidates: waiting jobs, by arrival; who starves is among them.
        """
        first, work = self.first, view.served_tokens - self._served_tokens
        self._served_tokens = view.served_tokens
        # A decode server gives room before it serves.
        if first is not None and (first.served_tokens or first in view.running):
            self._credit_tokens -= first.input_tokens + first.mean_tokens()
            first = None
        earned = self._share * work
        self._credit_tokens = min(self._pool_tokens, self._credit_tokens + earned)
        if not self._share:
            return None

        def may_be_first(job: Job) -> bool:
            return (
                not job.generated_tokens
                and job in line  # it was aborted, say
                and self._is_starved(job, view)
                and view.has_adapter(line.positions.of(job))
            )

        if first is None or not may_be_first(first):
            found = filter(may_be_first, candidates)
            first = next(found, None) if self._credit_tokens > 0 else None
        self.first = first
        return first
