"""Requests whose adapters (LoRA) find no room: others do not pass them for ever."""

from __future__ import annotations

from collections.abc import Callable, Container

from sage_sched.followed import Positions
from sage_sched.job import Job
from sage_sched.view import SchedulerView

# While the server works through so many batches (the KV that running jobs hold), others pass jobs
# without room for their adapters. With more, such jobs wait for longer; with fewer, the batch runs
# empty more often.
_BATCHES = 4


class Adapters:
    """Decides who passes a job whose adapter finds no room. The engine would let all others pass.

    If adapters that have room never run out of requests, no other ever gets it. So others pass only
    until the server has done so much work meanwhile (_BATCHES). From then on no job behind the
    first one of the order that has no room enters, until that one has room: jobs that run come to
    an end, and give back theirs. Then the count begins anew. So each job that stays first among
    those without room waits for a bounded time, under any policy. Nobody ever passes a promised
    job.
    """

    def __init__(self) -> None:
        # The server's work when the count began, and the job that nobody passes.
        self._since_tokens: int | None = None
        self._next: Job | None = None
        self._saw_any = self.is_closed = False

    def open(
        self, waiting: Container[Job], positions: Positions[Job], view: SchedulerView
    ) -> Callable[[Job], bool]:
        """Before the order is gone through. What this returns is asked of one job after another:
        whether it does not enter, so that nobody should yield to it. Once is_closed, those behind
        do not either."""
        first = self._next
        if not self._saw_any or (
            first is not None and (first not in waiting or view.has_adapter(positions.of(first)))
        ):
            self._since_tokens = self._next = None
        self._saw_any = self.is_closed = False
        fits = view.has_adapter if view.adapters_in_order is None else view.adapters_in_order()
        runs_any = bool(view.running or view.chunked)  # a server must not stand still

        def bars(job: Job) -> bool:
            nonlocal runs_any
            if self.is_closed:
                return True
            if view.has_adapter(position := positions.of(job)) and fits(position):
                runs_any = True
                return False
            self._saw_any = True
            if self._since_tokens is None:
                self._since_tokens = view.served_tokens
            worked_tokens = view.served_tokens - self._since_tokens
            is_due = self._next is not None or worked_tokens > _BATCHES * max(1, view.locked_tokens)
            if (is_due or job.goes_first) and runs_any:
                self._next, self.is_closed = job, True
            return True

        return bars
