"""When a request that has left the device is due back."""

from __future__ import annotations

import math

from sage_sched.job import Job
from sage_sched.view import SchedulerView

# A job that was due back stays for so many tokens. 32 or 128 are as good. Were it to stay to its
# end, the mean would rise by 13 % (README's mix, due after 60 s; simulated).
_TURN_TOKENS = 64


class Away:
    """Bounds the time that a job is away between two of its tokens.

    One that has been away for that long is due (Job.is_due): it goes before all others of its level
    as if it were promised its turn, and those that are neither yield to it at any price. Once it
    has had some tokens it may leave again. Where a policy holds it back (Policy.key), or where too
    little memory is held by jobs that may leave, it waits on.
    """

    def __init__(self, most_s: float = math.inf) -> None:
        self._most_s = most_s
        # Since when each is away, None until the clock is known to run: it may stand still while
        # nobody is away. And, of those that were due, at which age their turns end.
        self._since_s: dict[Job, float | None] = {}
        self._turns: dict[Job, int] = {}

    @property
    def needs_clock(self) -> bool:
        """Whether anybody is away."""
        return bool(self._since_s)

    def look(self, view: SchedulerView) -> None:
        """Find out who is due, before the jobs are ordered."""
        if self._most_s == math.inf:
            return
        waiting = [job for job in view.waiting if job.generated_tokens]
        since_s = {job: view.now_s if job in self._since_s else None for job in waiting}
        self._since_s = {job: self._since_s.get(job) or now_s for job, now_s in since_s.items()}
        for job, left_s in self._since_s.items():
            if left_s is not None and view.now_s - left_s > self._most_s and not job.is_promised:
                self._turns[job] = job.generated_tokens + _TURN_TOKENS
                job.call_back(True)
        for job, age in [*self._turns.items()]:
            if job.generated_tokens >= age:
                del self._turns[job]
                job.call_back(False)
