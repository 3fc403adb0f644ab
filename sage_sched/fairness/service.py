"""Counts the service that tenants have had."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from weakref import WeakKeyDictionary

from sage_sched.job import Job
from sage_sched.view import SchedulerView

# At most this many names are remembered, unless more have waiting or running requests.
_MOST_NAMES = 10_000
# A class and one of its tenants.
Name = tuple[str, str]


class Service:
    """Counts the service that each tenant has had, in weighted tokens: the counters of VTC (Sheng
    et al., OSDI 2024, Algorithm 2).

    If a tenant begins to wait, its count is raised to the smallest count among the waiting tenants
    of its class. If none waits, it is raised to the smallest count among the tenants that waited
    last. So tenants accumulate no credit while they are idle.
    """

    def __init__(self) -> None:
        # Service by tenant, in the order in which tenants were last served.
        self._had: dict[Name, float] = {}
        # Requests that run, or may have run since the last look.
        self._counted: dict[Job, tuple[Name, int]] = {}
        # Requests that ran before: they have ended, or wait.
        self._paused: WeakKeyDictionary[Job, tuple[Name, int]] = WeakKeyDictionary()
        # For each class, the number of waiting requests by tenant; and the tenants that waited at
        # the last look at which any did.
        self._waiting: dict[str, Counter[Name]] = {}
        self._waited: dict[str, set[Name]] = {}

    def joined(self, job: Job) -> None:
        if (name := _name_of(job)) is not None:
            self._waiting.setdefault(name[0], Counter())[name] += 1

    def left(self, job: Job) -> None:
        if (name := _name_of(job)) is None:
            return
        waiting = self._waiting[name[0]]
        waiting[name] -= 1
        if not waiting[name]:
            del waiting[name]
        self._begins(job, name)

    def _begins(self, job: Job, name: Name) -> None:
        if job not in self._counted:
            self._counted[job] = self._paused.pop(job, (name, 0))

    def look(self, view: SchedulerView) -> None:
        """Count the work since the last look, including the work for requests that have ended.
        Called once a plan."""
        here = dict.fromkeys(
            job for job in (*view.running, *view.chunked_jobs) if job.hints.shares_fairly
        )
        if not (here or self._counted or self._waiting):
            return
        for job in here:
            self._begins(job, (job.hints.slo_class, job.hints.tenant))
        for job, known in [*self._counted.items()]:
            counted = self._count(job, *known)
            if job in here:
                self._counted[job] = counted
            else:
                del self._counted[job]
                self._paused[job] = counted
        self._lift()
        self._forget()

    def _count(self, job: Job, name: Name, counted_tokens: int) -> tuple[Name, int]:
        done_tokens = job.served_tokens + job.generated_tokens
        if done_tokens != counted_tokens:
            had = self._had.pop(name, 0.0)
            self._had[name] = had + (done_tokens - counted_tokens) / job.hints.weight
        return name, done_tokens

    def of(self, name: Name) -> float:
        return self._had.get(name, 0.0)

    def _lift(self) -> None:
        for slo_class, names in self._waiting.items():
            waited = self._waited.get(slo_class, set())
            if not names or names.keys() == waited:
                continue
            least = min(map(self.of, waited & names.keys() or waited), default=0.0)
            for name in names:
                if name not in waited:
                    self._had[name] = max(self.of(name), least)
            self._waited[slo_class] = set(names)

    def _forget(self) -> None:
        """If there are too many names, forget the tenants without a request that were served
        longest ago."""
        num_excess = len(self._had) - _MOST_NAMES
        if num_excess > 0:
            busy = {name for name, _ in self._counted.values()}.union(*self._waited.values())
            idle = (name for name in self._had if name not in busy)
            for name in [*islice(idle, num_excess)]:
                del self._had[name]


def _name_of(job: Job) -> Name | None:
    """Return the job's tenant; None if its class does not share fairly."""
    return (job.hints.slo_class, job.hints.tenant) if job.hints.shares_fairly else None
