"""Bounds how long a request without a free adapter slot (LoRA) is overtaken by others."""

from __future__ import annotations

from collections.abc import Callable, Container

from sage_sched.followed import Positions
from sage_sched.job import Job
from sage_sched.view import SchedulerView

# Other jobs may overtake jobs without an adapter slot until the server has worked through this many
# batches. A batch is the number of KV tokens that running jobs hold. With more batches, jobs
# without a slot wait longer. With fewer, the batch runs empty more often.
_BATCHES = 4


class Adapters:
    """Decides which jobs overtake a job without an adapter slot. SGLang itself would let all others
    overtake it.

    If loaded adapters never ran out of requests, no other adapter would ever get a slot. So other
    jobs overtake a job without a slot only until the server has worked through _BATCHES batches.
    From then on, no job behind the first job without a slot enters. Running jobs end and free their
    slots, until that job gets one. Then the count begins again. So each job that stays first among
    the jobs without a slot waits for a bounded time, under any policy. No job ever overtakes a job
    that goes first.
    """

    def __init__(self) -> None:
        # The server's work when the count began, and the job that no other may overtake.
        self._since_tokens: int | None = None
        self._next: Job | None = None
        self._saw_any = self.is_closed = False

    def open(
        self, waiting: Container[Job], positions: Positions[Job], view: SchedulerView
    ) -> Callable[[Job], bool]:
        """Start a walk through the order. Return a function to call with each job in turn. It
        returns whether the job stays in the queue, so that no job is preempted for it. Once
        is_closed is true, all later jobs stay."""
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
