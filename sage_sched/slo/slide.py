"""SlideBatching (ProServe, Algorithm 1): orders one queue, sets the time of a batch, and gives very
late jobs a share of the work."""

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

# Keys of jobs with an SLO. They go before the keys of sage, which the other jobs have.
STARVED, _BY_DENSITY, _BY_DEADLINE = -1e300, -3e9, -2e9
_LAST_S = 9e8


class Queue(NamedTuple):
    """The running and waiting jobs; arrays of shape (jobs,).

    exec_s: seconds that each job's next token takes, without the fixed time of a batch, above 0.
    remain_s: seconds until that token's deadline; below 0 if it is late.
    density: the gain per second of serving the job.
    """

    exec_s: Floats
    remain_s: Floats
    density: Floats


@dataclass(frozen=True, slots=True)
class Slide:
    """The rules of Algorithm 1. fixed_s: the fixed time of a batch (t_c). least_s: the shortest
    batch (eta)."""

    fixed_s: float
    least_s: float

    def budget_s(self, queue: Queue) -> float:
        """Return how long a batch may take: until the first deadline. Tokens that can no longer be
        in time do not count (xLLM). inf if no token can be in time."""
        in_time = queue.remain_s >= queue.exec_s + self.fixed_s
        return max(float(queue.remain_s[in_time].min(initial=math.inf)), self.least_s)

    def is_urgent(self, queue: Queue, budget_s: float) -> NDArray[np.bool_]:
        """Return which jobs would be late if all others went first (eq. 8, gamma 1)."""
        work_s = float(queue.exec_s.sum())
        if budget_s == math.inf:
            needed_s = work_s
        elif budget_s > self.fixed_s:
            needed_s = budget_s / (budget_s - self.fixed_s) * work_s
        else:
            needed_s = math.inf
        return queue.remain_s < needed_s


def keys(queue: Queue, by_density: NDArray[np.bool_]) -> Floats:
    """Return the key of each job. Jobs ordered by density, such as the urgent ones, come first,
    then the others by their deadlines."""
    by_deadline = _BY_DEADLINE + np.minimum(queue.remain_s, _LAST_S)
    return np.where(by_density, _BY_DENSITY - queue.density, by_deadline)


class StarvedShare:
    """Picks the starved job that goes first, by arrival, while the work for starved jobs is below
    their share.

    This rule is ours. Without a limit, serving starved jobs before everything else would make
    overload last (ProServe, section 3.2).

    first: the last pick.
    """

    def __init__(
        self, share: float, pool_tokens: float, is_starved: Callable[[Job, SchedulerView], bool]
    ) -> None:
        """Give starved jobs a share of the server's work, in [0, 1).

        pool_tokens: the most credit that can be saved up. is_starved: whether a job without a token
        starves.
        """
        self._share = share
        self._pool_tokens = pool_tokens
        self._credit_tokens = 0.0
        self._served_tokens = 0
        self._is_starved = is_starved
        self.first: Job | None = None

    def choose(
        self, candidates: Iterable[Job], view: SchedulerView, line: WaitingQueue
    ) -> Job | None:
        """Return the waiting job that goes first; None if none does. Call once a pass.

        candidates: waiting jobs by arrival, including all starved ones.
        """
        first, work = self.first, view.served_tokens - self._served_tokens
        self._served_tokens = view.served_tokens
        # A decode server admits a job before it serves it.
        if first is not None and (first.served_tokens or first in view.running):
            self._credit_tokens -= first.input_tokens + first.mean_tokens()
            first = None
        earned = self._share * work
        self._credit_tokens = min(self._pool_tokens, self._credit_tokens + earned)
        if not self._share:
            return None
        has_slot = line.has_slot(view)

        def may_be_first(job: Job) -> bool:
            return (
                not job.generated_tokens
                and job in line  # it may have been aborted
                and self._is_starved(job, view)
                and has_slot(job)
            )

        if first is None or not may_be_first(first):
            found = filter(may_be_first, candidates)
            first = next(found, None) if self._credit_tokens > 0 else None
        self.first = first
        return first
