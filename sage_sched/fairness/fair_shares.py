"""Fair shares among the tenants of a class: the tenant with the least service so far goes first."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sage_sched.job import Job
from sage_sched.sorted_jobs import Entry, SortedJobs, Walk

if TYPE_CHECKING:
    from sage_sched.view import SchedulerView

# At most this many names are remembered, unless more have waiting or running requests.
_MOST_NAMES = 10_000
# A token of the answer counts for this many tokens of the prompt (Sheng et al., section 3.1).
_ANSWER_WEIGHT = 2.0
# A class and one of its tenants.
Name = tuple[str, str]
# Jobs by level and class, then tenant.
ByTenant = dict[tuple[float, str], dict[str, SortedJobs]]


class Service:
    """Counts the service that each tenant has had, in weighted tokens: the counters of VTC (Sheng
    et al., OSDI 2024, Algorithm 2).

    A tenant that begins to wait is lifted to the least served tenant of its class that already
    waits. If none waits, it is lifted to the least served one that waited last. So tenants
    accumulate no credit while they are idle.
    """

    def __init__(self, name_of: Callable[[Job], Name | None]) -> None:
        self._name_of = name_of
        # Service by tenant, in the order in which tenants were last served.
        self._had: dict[Name, float] = {}
        # Requests that run, or may have run since the last look.
        self._counted: dict[Job, tuple[Name, int]] = {}
        # Requests that ran before: they have ended, or wait.
        self._away: WeakKeyDictionary[Job, tuple[Name, int]] = WeakKeyDictionary()
        # For each class, the number of waiting requests by tenant; and the tenants that waited at
        # the last look at which any did.
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

    @property
    def any_waits(self) -> bool:
        return any(self._waiting.values())

    def _begins(self, job: Job, name: Name) -> None:
        if job not in self._counted:
            self._counted[job] = self._away.pop(job, (name, 0))

    def look(self, view: SchedulerView) -> None:
        """Count the work since the last look, ended requests included. Called once a plan."""
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
        """If there are too many names, forget the tenants without a request that were served
        longest ago."""
        num_excess = len(self._had) - _MOST_NAMES
        if num_excess > 0:
            busy = {name for name, _ in self._counted.values()}.union(*self._waited.values())
            idle = (name for name in self._had if name not in busy)
            for name in [*islice(idle, num_excess)]:
                del self._had[name]


class FairShares:
    """Lets the tenants of a class take turns, if the class shares fairly (sage_sched.slo.classes).

    Keeps the jobs that share, by level and class, then tenant, next to the waiting queue.
    """

    def __init__(self) -> None:
        self._service = Service(lambda job: _name_of(job) if job.hints.shares_fairly else None)
        self.begins_to_wait = self._service.begins_to_wait
        self._costs: dict[Job, float] = {}
        self._by_tenant: ByTenant = {}

    def waits_no_more(self, job: Job) -> None:
        self._service.waits_no_more(job)
        self._costs.pop(job, None)

    def look(self, view: SchedulerView) -> None:
        """Count the tenants' service, before they take turns."""
        self._service.look(view)

    def placed(self, entry: Entry) -> None:
        """Note that the queue has put a job in its place."""
        if _shares(entry):
            _put_in(entry, self._by_tenant)

    def taken_out(self, entry: Entry) -> None:
        """Note that the queue has taken a job out of its place."""
        hints = entry[3].hints
        tenants = self._by_tenant.get((entry[0], hints.slo_class), {})
        if not hints.shares_fairly or (jobs := tenants.get(hints.tenant)) is None:
            return
        for entries in (jobs.ranked, jobs.unranked):  # it may have been ranked since
            at = bisect_left(entries, entry)
            if at < len(entries) and entries[at] is entry:
                del entries[at]
        if not jobs.ranked and not jobs.unranked:
            del tenants[hints.tenant]

    def in_turns(
        self,
        walk: Walk,
        moving: Iterable[Entry],
        num_ahead: Callable[[Entry, Entry], int],
        skips: Callable[[Job], bool],
    ) -> Iterator[Job | None]:
        """Yield the jobs of a walk, with turns: the places of a sharing class's jobs go to its
        tenants in turn. Yield None for each job that is left out.

        moving: jobs of the walk whose keys move. num_ahead: see Walk.
        skips: whether a job is left out; asked in the order of turns, because adapter slots are
            given in that order.
        """
        by_tenant = self._by_tenant
        sharing = [each for each in moving if _shares(each)] if self._service.any_waits else []
        if sharing:
            by_tenant = {
                of: {name: jobs.copy() for name, jobs in own.items()}
                for of, own in by_tenant.items()
            }
            for each in sharing:
                _put_in(each, by_tenant, is_ranked=True)
        turns: dict[tuple[float, str], Iterator[Job | None]] = {}
        while (entry := walk.next()) is not None:
            job = entry[3]
            if not _shares(entry):
                yield None if skips(job) else job
                continue
            of_class = entry[0], job.hints.slo_class
            if of_class not in turns:
                walks = {
                    tenant: Walk(jobs, walk.first_arrival, num_ahead=num_ahead)
                    for tenant, jobs in by_tenant[of_class].items()
                }
                turns[of_class] = self._turns(of_class[1], walks, skips)
            yield next(turns[of_class], None)

    def _turns(
        self, slo_class: str, walks: Mapping[str, Walk], skips: Callable[[Job], bool]
    ) -> Iterator[Job | None]:
        """Yield the jobs of a class in turns; each tenant's jobs come in their order.

        A tenant's service includes the expected service of its requests ahead (VTC with length
        prediction, section 4.4). walks: each tenant's jobs.
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


def _shares(entry: Entry) -> bool:
    job = entry[3]
    return job.hints.shares_fairly and not job.goes_first and entry[0] < math.inf


def _put_in(entry: Entry, by_tenant: ByTenant, *, is_ranked: bool = False) -> None:
    job = entry[3]
    tenants = by_tenant.setdefault((entry[0], job.hints.slo_class), {})
    jobs = tenants.setdefault(job.hints.tenant, SortedJobs())
    insort(jobs.ranked if is_ranked else jobs.of(job), entry)


def _name_of(job: Job) -> Name:
    return job.hints.slo_class, job.hints.tenant


def _cost(job: Job) -> float:
    """Return the expected service of a whole request."""
    return (job.input_tokens + _ANSWER_WEIGHT * job.mean_tokens()) / job.hints.weight
