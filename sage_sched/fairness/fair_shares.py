"""Fair shares among the tenants of a class: the one with the least service so far goes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sage_sched.job import Job
from sage_sched.row import Entry, Walk

if TYPE_CHECKING:
    from sage_sched.view import SchedulerView

# So many names are remembered, or more if more have requests that wait or run.
_MOST_NAMES = 10_000
# A token of the answer counts for so many of the prompt (Sheng et al., section 3.1).
_ANSWER_WEIGHT = 2.0
# A class and one of its tenants.
Name = tuple[str, str]


class Service:
    """How much service each tenant has had, in tokens by weight: the counters of VTC (Sheng et al.,
    OSDI 2024, Algorithm 2).

    A tenant that begins to wait is lifted to the least served of its class that waits already or,
    if nobody waits, that waited last: nobody saves up service by staying away.
    """

    def __init__(self, name_of: Callable[[Job], Name | None]) -> None:
        self._name_of = name_of
        # In the order in which they were last served.
        self._had: dict[Name, float] = {}
        # Requests that run, or may have run since the last look.
        self._counted: dict[Job, tuple[Name, int]] = {}
        # Requests that ran before: they have ended, or wait.
        self._away: WeakKeyDictionary[Job, tuple[Name, int]] = WeakKeyDictionary()
        # By class, how many requests of each wait; and who waited at the last look at which
        # anybody did.
        self._waiting: dict[str, Counter[Name]] = {}
        self._waited: dict[str, set[Name]] = {}

    def begins_to_wait(self, job: Job) -> None:
        if (name := self._name_of(job)) is not None:
            self._waiting.setdefault(name[0], Counter())[name] += 1

    def waits_no_more(self, job: Job) -> None:
        if (name := self._name_of(job)) is None:
            return
        waiting = self._waiting[name[0]]
        waiting[name] -= 1
        if not waiting[name]:
            del waiting[name]
        self._begins(job, name)

    def _begins(self, job: Job, name: Name) -> None:
        if job not in self._counted:
            self._counted[job] = self._away.pop(job, (name, 0))

    def look(self, view: SchedulerView) -> None:
        """Count the work since the last look, ended requests included. Once a plan."""
        here = {*view.running, *view.chunked_jobs}
        for job in (*view.running, *view.chunked_jobs):
            if (name := self._name_of(job)) is not None:
                self._begins(job, name)
        for job, known in [*self._counted.items()]:
            counted = self._count(job, *known)
            if job in here:
                self._counted[job] = counted
            else:
                del self._counted[job]
                self._away[job] = counted
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
        """If there are too many, forget those without a request that were served longest ago."""
        num_excess = len(self._had) - _MOST_NAMES
        if num_excess > 0:
            busy = {name for name, _ in self._counted.values()}.union(*self._waited.values())
            idle = (name for name in self._had if name not in busy)
            for name in [*islice(idle, num_excess)]:
                del self._had[name]


class FairShares:
    """Gives tenants their turns, in classes that share fairly (sage_sched.slo.classes)."""

    def __init__(self) -> None:
        self._service = Service(lambda job: _name_of(job) if job.hints.shares_fairly else None)
        self.begins_to_wait = self._service.begins_to_wait
        self._costs: dict[Job, float] = {}

    def waits_no_more(self, job: Job) -> None:
        self._service.waits_no_more(job)
        self._costs.pop(job, None)

    def look(self, view: SchedulerView) -> None:
        """Count the tenants' service, before they take turns."""
        self._service.look(view)

    def turns(
        self, slo_class: str, walks: Mapping[str, Walk], skips: Callable[[Job], bool]
    ) -> Iterator[Job | None]:
        """Which job of a class comes next: its tenants take turns, each with its own jobs in their
        order. A tenant's service includes what its requests ahead are expected to take (VTC with
        length prediction, section 4.4).

        walks: of each tenant's jobs. skips: of jobs that are left out, each None in its turn; asked
        in the order of turns, as room for adapters is given in it.
        """
        heap: list[tuple[float, Entry, str]] = []

        def begins(tenant: str, had: float) -> None:
            if (entry := walks[tenant].next()) is not None:
                heappush(heap, (had, entry, tenant))

        for tenant in walks:
            begins(tenant, self._service.of((slo_class, tenant)))
        while heap:
            had, entry, tenant = heappop(heap)
            job = entry[3]
            if skips(job):
                yield None
            else:
                yield job
                if job not in self._costs:
                    self._costs[job] = _cost(job)
                had += self._costs[job]
            begins(tenant, had)


def _name_of(job: Job) -> Name:
    return job.hints.slo_class, job.hints.tenant


def _cost(job: Job) -> float:
    """The expected service of a whole request."""
    return (job.input_tokens + _ANSWER_WEIGHT * job.mean_tokens()) / job.hints.weight
