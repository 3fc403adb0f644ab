"""Gives the tenants of a class fair shares: the tenant with the least service so far goes first."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush

from sage_sched.fairness.service import Service
from sage_sched.job import Job
from sage_sched.limit import Limit
from sage_sched.sorted_jobs import Entry, Group, SortedJobs, walk
from sage_sched.view import SchedulerView

# A token of the answer counts for this many tokens of the prompt (Sheng et al., section 3.1).
_ANSWER_WEIGHT = 2.0
# Jobs by level and class, then tenant.
ByTenant = dict[tuple[float, str], dict[str, SortedJobs]]
_NO_JOBS = SortedJobs()


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

    def joined(self, job: Job) -> None:
        """Note that a job has joined the queue."""
        self._service.joined(job)

    def left(self, job: Job) -> None:
        """Note that a job has left the queue."""
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
            insort(tenants.setdefault(job.hints.tenant, SortedJobs()).of(job), entry)

    def taken_out(self, entry: Entry) -> None:
        """Note that the queue has taken a job out of its place."""
        hints = entry[3].hints
        of_class = entry[0], hints.slo_class
        tenants = self._by_tenant.get(of_class, {})
        if not hints.shares_fairly or (jobs := tenants.get(hints.tenant)) is None:
            return
        for entries in (jobs.ranked, jobs.unranked):  # the job may have been ranked since
            at = bisect_left(entries, entry)
            if at < len(entries) and entries[at] is entry:
                del entries[at]
        if not jobs.ranked and not jobs.unranked:
            del tenants[hints.tenant]
        if not tenants:  # clients may name any number of priorities
            del self._by_tenant[of_class]

    def in_turns(
        self,
        entries: Iterable[Entry],
        first_arrival: int,
        moving: Callable[[], Mapping[Group, Iterator[Entry]]],
        num_ahead: Callable[[Entry, Entry], int],
        skips: Callable[[Job], bool],
    ) -> Iterator[Job]:
        """Yield the jobs in the order in which to serve them, without those that are left out. The
        places of a class that shares fairly go to its tenants in turn.

        entries: the queue in the policy's order. moving: returns, by group and in order, the
            entries whose keys change while they wait.
        first_arrival, num_ahead: see sage_sched.sorted_jobs.walk.
        skips: whether a job is left out. It is called in the order of the result, because jobs get
            LoRA adapter slots in that order.
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
                    tenant: walk(
                        ours.get(tenant, _NO_JOBS), first_arrival, theirs.get(tenant, ()), num_ahead
                    )
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


def _shares(entry: Entry) -> bool:
    job = entry[3]
    return job.hints.shares_fairly and not job.goes_first and entry[0] < math.inf


def _cost(job: Job) -> float:
    """Return the expected service of a whole request."""
    return (job.input_tokens + _ANSWER_WEIGHT * job.mean_tokens()) / job.hints.weight
