"""Fair shares among the tenants of a class: the one with the least service so far goes first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sage_sched.job import Job

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
        self._counted: dict[Job, tuple[Name, int]] = {}
        # Requests in no view: they have ended, or are prefilled in chunks.
        self._away: WeakKeyDictionary[Job, tuple[Name, int]] = WeakKeyDictionary()
        # By class, who waited at the last look at which anybody did.
        self._waited: dict[str, set[Name]] = {}

    def look(self, view: SchedulerView) -> None:
        """Count the work since the last look, ended requests included. Once a plan."""
        counted: dict[Job, tuple[Name, int]] = {}
        for job in (*view.waiting, *view.running):
            known = self._counted.pop(job, None)
            if known is not None:
                counted[job] = self._count(job, *known)
            elif (name := self._name_of(job)) is not None:
                counted[job] = self._count(job, *self._away.pop(job, (name, 0)))
        for job, known in self._counted.items():
            self._away[job] = self._count(job, *known)
        self._counted = counted
        self._lift([counted[job][0] for job in view.waiting if job in counted])
        self._forget()

    def _count(self, job: Job, name: Name, counted_tokens: int) -> tuple[Name, int]:
        done_tokens = job.served_tokens + job.generated_tokens
        if done_tokens != counted_tokens:
            had = self._had.pop(name, 0.0)
            self._had[name] = had + (done_tokens - counted_tokens) / job.hints.weight
        return name, done_tokens

    def of(self, name: Name) -> float:
        return self._had.get(name, 0.0)

    def _lift(self, waiting: Iterable[Name]) -> None:
        # In the order of the names' first requests: a set's own order differs between processes.
        names_of: dict[str, dict[Name, None]] = {}
        for name in waiting:
            names_of.setdefault(name[0], {})[name] = None
        for slo_class, names in names_of.items():
            waited = self._waited.get(slo_class, set())
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


class Tenants:
    """Gives tenants their turns, in classes that share fairly (sage_sched.slo.classes)."""

    def __init__(self) -> None:
        self._service = Service(lambda job: _name_of(job) if job.hints.shares_fairly else None)
        self._costs: dict[Job, float] = {}
        # True from the first request of such a class on.
        self._looks = False

    def in_turn(self, order: list[int], num_open: int, view: SchedulerView) -> list[int]:
        """The order with the places of such a class, within a level, given to its tenants in turn,
        each with its own requests in their order. Promised jobs, and those held back (from num_open
        on), keep their places."""
        fair = [job for job in view.waiting if job.hints.shares_fairly]
        if not fair and not self._looks:
            return order
        self._looks = True
        self._service.look(view)
        self._costs = {job: self._costs.get(job) or _cost(job) for job in fair}
        places_of: dict[tuple[float, str], list[int]] = {}
        for place, position in enumerate(order[:num_open]):
            job = view.waiting[position]
            if job.hints.shares_fairly and not job.is_promised:
                places_of.setdefault((job.level, job.hints.slo_class), []).append(place)
        found = list(order)
        for places in places_of.values():
            turns = self._turns([view.waiting[order[place]] for place in places])
            for place, turn in zip(places, turns, strict=True):
                found[place] = order[places[turn]]
        return found

    def _turns(self, jobs: Sequence[Job]) -> Iterator[int]:
        """Which job of one class, given in their order, comes next. A tenant's service includes
        what its requests ahead are expected to take (VTC with length prediction, section 4.4)."""
        queues: dict[Name, deque[int]] = {}
        for i, job in enumerate(jobs):
            queues.setdefault(_name_of(job), deque()).append(i)
        heap = [(self._service.of(name), queue[0], name) for name, queue in queues.items()]
        heapify(heap)
        while heap:
            had, first, name = heappop(heap)
            queue = queues[name]
            yield queue.popleft()
            if queue:
                heappush(heap, (had + self._costs[jobs[first]], queue[0], name))


def _name_of(job: Job) -> Name:
    return job.hints.slo_class, job.hints.tenant


def _cost(job: Job) -> float:
    """The expected service of a whole request."""
    return (job.input_tokens + _ANSWER_WEIGHT * job.mean_tokens()) / job.hints.weight
