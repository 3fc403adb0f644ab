"""A share of the server's work that some jobs may use ahead of all others."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.view import SchedulerView


class Credit:
    """Grants jobs their way to the front, as far as its credit (tokens of work) goes.

    It begins with `most_tokens`, never has more, and earns `share` of all work of the server. A
    grant costs what the job is expected to need, and is made only if there is so much. What a
    granted job takes beyond that is charged as it is taken. So granted jobs get at most that share
    of all work, plus most_tokens, plus what unfinished ones still need beyond their forecasts.
    """

    def __init__(self, share: float, most_tokens: int) -> None:
        self._share = share
        self._most_tokens = most_tokens
        self._left_tokens = float(most_tokens)
        self._served_tokens = 0
        # What each unfinished job with a grant was charged.
        self._charged: dict[Job, float] = {}

    def has_grant(self, job: Job) -> bool:
        return job in self._charged

    def look(self, view: SchedulerView) -> None:
        """Count what was earned and spent since the last look. Once a pass, before any grant."""
        earned = self._share * (view.served_tokens - self._served_tokens)
        self._served_tokens = view.served_tokens
        self._left_tokens = min(self._most_tokens, self._left_tokens + earned)
        if not self._charged:
            return
        for job, charged in self._charged.items():
            if job.served_tokens > charged:
                self._left_tokens -= job.served_tokens - charged
                self._charged[job] = job.served_tokens
        alive = {*view.waiting, *view.running, view.chunked}
        self._charged = {job: tokens for job, tokens in self._charged.items() if job in alive}

    def grant(self, job: Job, num_tokens: float) -> bool:
        """Whether a job that is expected to need so much goes to the front."""
        if num_tokens > self._left_tokens:
            return False
        self._left_tokens -= num_tokens
        self._charged[job] = num_tokens
        return True
