"""A share of the work for jobs that are late by more than their whole TTFT."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.slo.promised import Pair
from sage_sched.view import SchedulerView


class StarvedShare:
    """Picks the job that goes first, by arrival, as long as the work for such jobs is less than
    their share.

    This is ours. Without a limit, serving them before whatever else is due would make overload last
    (ProServe, section 3.2).

    first: the last pick.
    """

    def __init__(self, share: float, most_tokens: float) -> None:
        """share: of the server's work, in [0, 1). most_tokens: the most that can be saved up."""
        self._share = share
        self._most_tokens = most_tokens
        self._credit_tokens = 0.0
        self._served_tokens = 0
        self.first: Job | None = None

    def choose(self, waiting: list[Pair], view: SchedulerView) -> Job | None:
        """The waiting job that goes first; None if none does. Once a pass."""
        first, work = self.first, view.served_tokens - self._served_tokens
        self._served_tokens = view.served_tokens
        if first is not None and first.served_tokens:
            self._credit_tokens -= first.input_tokens + first.mean_tokens()
            first = None
        elif first is not None and first not in view.waiting:  # it was aborted, say
            first = None
        earned = self._share * work
        self._credit_tokens = min(self._most_tokens, self._credit_tokens + earned)
        if first is None and self._credit_tokens > 0 and self._share:
            now_s = view.now_s
            late = [
                (job.arrival, job)
                for job, p in waiting
                if now_s > p.due_s + p.promise.ttft_s and not job.generated_tokens
            ]
            first = min(late)[1] if late else None
        self.first = first
        return first
