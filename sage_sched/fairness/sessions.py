"""When the requests of a session count as come."""

from __future__ import annotations

from collections.abc import Iterable

from sage_sched.job import Job

# So many sessions are remembered; the one that has had no request for longest is forgotten first.
_MOST_SESSIONS = 10_000


class Sessions:
    """A session is one task to its owner, so all its requests count as come when it began.

    Sessions that began first then end first, and fewer share the KV pool at a time. So that a
    session's first request is not last of all, it counts as come with the oldest session that
    waits, as does a request without a session. Times are in tokens that the server had served.
    """

    def __init__(self) -> None:
        # In the order of their last requests.
        self._began: dict[str, int] = {}
        self._new: list[Job] = []
        self._later: dict[Job, int] = {}

    def came_at(self, job: Job) -> int:
        """When a job that arrives now counts as come, as far as is known yet."""
        name = job.hints.session
        if name in self._began:
            began = self._later[job] = self._began[name] = self._began.pop(name)
            return began
        if name:
            if len(self._began) >= _MOST_SESSIONS:
                del self._began[next(iter(self._began))]
            self._began[name] = job.served_at_arrival_tokens
        self._new.append(job)
        return job.served_at_arrival_tokens

    def moved_up(self, waiting: Iterable[Job]) -> tuple[list[Job], int]:
        """The jobs that have come since the last pass and count as come with a session's, and that
        time; none if no session's later request waits."""
        new, self._new = self._new, []
        if not self._later:
            return [], 0
        self._later = {job: self._later[job] for job in waiting if job in self._later}
        return (new, min(self._later.values())) if self._later else ([], 0)
