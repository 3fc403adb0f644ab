"""Gives the tenants of a class fair shares: the tenant with the least service so far goes first."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, merge
from itertools import islice
from weakref import WeakKeyDictionary

from sage_sched.job import Entry, Group, Job
from sage_sched.limit import Limit
from sage_sched.view import SchedulerView

# A token of the answer counts for this many tokens of the prompt (Sheng et al., section 3.1).
_ANSWER_WEIGHT = 2.0
# At most this many names are remembered, unless more have waiting or running requests.
_MOST_NAMES = 10_000
# A class and one of its tenants.
Name = tuple[str, str]
# Jobs by level and class, then tenant.
ByTenant = dict[tuple[float, str], dict[str, list[Entry]]]


class FairShares(Limit):
    """Lets the tenants of a class take turns, if the class shares fairly (sage_sched.slo.classes).

    It keeps the jobs of such classes, by level and class, then by tenant. They are in the waiting
    queue too.
    """

    def __init__(self) -> None:
        self.is_engaged = False
        self._service = Service()
        self._costs: dict[Job, float] = {}
        self._by_tenant: ByTenant = {}

    def concerns(self, job: Job) -> bool:
        return job.hints.shares_fairly

    def queued(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._service.joined(job)

    def dequeued(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._service.left(job)
            self._costs.pop(job, None)

    def look(self, view: SchedulerView, begun: Collection[Job]) -> None:
        """Count the tenants' service, before they take turns."""
        self._service.look(view)

    def placed(self, entry: Entry) -> None:
        """Note that the queue has put a job in its place."""
        if _shares(entry):
            job = entry[3]
            tenants = self._by_tenant.setdefault((entry[0], job.hints.slo_class), {})
            insort(tenants.setdefault(job.hints.tenant, []), entry)

    def taken_out(self, entry: Entry) -> None:
        """Note that the queue has taken a job out of its place."""
        hints = entry[3].hints
        of_class = entry[0], hints.slo_class
        tenants = self._by_tenant.get(of_class, {})
        if not hints.shares_fairly or (jobs := tenants.get(hints.tenant)) is None:
            return
        at = bisect_left(jobs, entry)
        if at < len(jobs) and jobs[at] is entry:
            del jobs[at]
        if not jobs:
            del tenants[hints.tenant]
        if not tenants:  # clients may name any number of priorities
            del self._by_tenant[of_class]

    def in_turns(
        self,
        entries: Iterable[Entry],
        moving: Callable[[], Mapping[Group, Iterator[Entry]]],
        skips: Callable[[Job], bool],
    ) -> Iterator[Job]:
        """Yield the jobs in the order in which to serve them, without the ones to skip. The places
        of a class that shares fairly go to its tenants in turn.

        entries: the queue in the policy's order. moving: returns, by group and in order, the
            entries whose keys change while they wait.
        skips: whether to skip a job. It is called in the order of the result, because jobs get LoRA
            adapter slots in that order.
        """
        moving_of: dict[tuple[float, str], dict[str, Iterator[Entry]]] = {}
        for (level, slo_class, tenant), jobs in moving().items():
            moving_of.setdefault((level, slo_class), {})[tenant] = jobs
        turns: dict[tuple[float, str], Iterator[Job | None]] = {}
        for entry in entries:
            job = entry[3]
            if not _shares(entry):
                if not skips(job):
                    yield job
                continue
            of_class = entry[0], job.hints.slo_class
            if of_class not in turns:
                ours, theirs = self._by_tenant.get(of_class, {}), moving_of.get(of_class, {})
                walks = {
                    tenant: _merged(ours.get(tenant, ()), theirs.get(tenant))
                    for tenant in {**ours, **theirs}
                }
                turns[of_class] = self._turns(of_class[1], walks, skips)
            if (turn := next(turns[of_class], None)) is not None:
                yield turn

    def _turns(
        self, slo_class: str, walks: Mapping[str, Iterator[Entry]], skips: Callable[[Job], bool]
    ) -> Iterator[Job | None]:
        """Yield the jobs of a class, its tenants in turn. Each tenant's jobs come in their order.

        A tenant's service includes the expected service of its requests ahead (VTC with length
        prediction, section 4.4). walks: each tenant's jobs.
        """
        heap: list[tuple[float, Entry, str]] = []

        def begins(tenant: str, had: float) -> None:
            if (entry := next(walks[tenant], None)) is not None:
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


def _merged(placed: Sequence[Entry], moving: Iterator[Entry] | None) -> Iterator[Entry]:
    if moving is None:
        return iter(placed)
    return merge(placed, moving) if placed else moving


def _shares(entry: Entry) -> bool:
    job = entry[3]
    return job.hints.shares_fairly and not job.goes_first and entry[0] < math.inf


def _cost(job: Job) -> float:
    """Return the expected service of a whole request."""
    return (job.input_tokens + _ANSWER_WEIGHT * job.mean_tokens()) / job.hints.weight


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
