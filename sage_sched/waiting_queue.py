"""Keeps the waiting jobs in order from plan to plan, because sorting a long queue takes long."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol
from weakref import ref

from sage_sched.adapters import Adapters
from sage_sched.fair_shares import FairShares
from sage_sched.followed import HEAD, HEAD_IF_FULL, Followed, Positions
from sage_sched.job import Entry, Group, Job, Place
from sage_sched.limit import Limit
from sage_sched.view import SchedulerView

# At most this many new jobs join the order in a plan, by arrival. The others wait for the next
# plan.
NUM_JOINING = 64
# At most this many jobs are ranked again in a plan after the keys of all have changed.
NUM_RANKED_ANEW = 32
_arrival = attrgetter("arrival")


class Ranking(Protocol):
    """The parts of a policy that its queue uses, see sage_sched.policy."""

    traits: Any

    def key(self, job: Job, view: SchedulerView) -> float: ...

    def rank(self, job: Job) -> None: ...


def place_of(job: Job, policy: Ranking, view: SchedulerView) -> Place:
    """Return the place of a job. A job that is held back (Policy.key) is behind the jobs of all
    levels."""
    if job.is_held:
        return math.inf, 0.0, job.arrival
    if job.goes_first:
        return job.level, -math.inf, job.arrival
    key = policy.key(job, view)
    if math.isnan(key):  # the order would depend on the queue's order
        raise ValueError(f"the key of {job} is not a number")
    return math.inf if key == math.inf else job.level, key, job.arrival


def most_ordered(view: SchedulerView) -> int:
    """Return how many jobs a plan orders at most."""
    return HEAD_IF_FULL if view.batch_is_full else HEAD


class MovingKeys:
    """Orders, in each pass, the waiting jobs whose keys may change although the jobs do not. A
    policy with a faster way has a subclass."""

    def __init__(self, policy: Ranking) -> None:
        self._policy = policy

    def has(self, job: Job) -> bool:
        """Whether the key of this job changes while it waits."""
        return True

    def first(self, jobs: Collection[Job], num: int, view: SchedulerView) -> list[Entry]:
        """Return at least the first num of these jobs, in order."""
        return sorted((*place_of(job, self._policy, view), job) for job in jobs)

    def groups(self, jobs: Collection[Job], view: SchedulerView) -> dict[Group, Iterator[Entry]]:
        """Return the jobs whose classes share fairly, in order, by group. A job that is held back
        is in none."""
        groups: dict[Group, list[Entry]] = {}
        for entry in self.first(jobs, len(jobs), view):
            if entry[0] < math.inf and (group := entry[3].group) is not None:
                groups.setdefault(group, []).append(entry)
        return {group: iter(entries) for group, entries in groups.items()}


def _in_order(jobs: Collection[Job], keys: MovingKeys, view: SchedulerView) -> Iterator[Entry]:
    """Yield jobs whose keys move in the order of one pass. They are sorted as they are read."""
    head = keys.first(jobs, HEAD, view)
    yield from head
    if len(head) < len(jobs):
        yield from keys.first(jobs, len(jobs), view)[len(head) :]


class WaitingQueue:
    """The waiting jobs, in the order of one policy.

    A job is placed when it joins, and again when its place may have changed, which the job notes
    itself (Job.watch). So a plan touches only the first jobs of the order, and jobs that come, go
    or change.

    came, left: the jobs that have joined and left since the last pass announced to the policy
        (Policy.on_pass). A job may have left and come again.
    joined: jobs that have joined since take_joined.
    begun: waiting jobs with tokens, and how many tokens they had when they joined.
    revision: how often the keys of all jobs have changed, for example because the server's step
        times have. The jobs are then ranked again, some in each plan.
    """

    def __init__(self, policy: Ranking) -> None:
        self._policy = policy
        moving = policy.traits.moving
        self._keys: MovingKeys | None = None if moving is None else moving(policy)
        self._followers: list[Limit] = []
        self._fair_shares: FairShares | None = None
        self._adapters: Adapters | None = None
        self._queue = Followed[Job]()
        self._coming: dict[Job, None] = {}
        self._changed: dict[Job, None] = {}
        self._sorted: list[Entry] = []
        self._entries: dict[Job, Entry | None] = {}
        # Jobs whose keys move.
        self._moving: dict[Job, None] = {}
        self._outdated: deque[Job] = deque()
        self.revision = self._revision = 0
        self._view: ref[SchedulerView] | None = None
        self.positions = Positions[Job](())
        self.joined: list[Job] = []
        self.came: dict[Job, None] = {}
        self.left: dict[Job, None] = {}
        self.begun: dict[Job, int] = {}

    def __contains__(self, job: object) -> bool:
        return job in self._entries

    def use(
        self,
        followers: list[Limit],
        fair_shares: FairShares | None,
        adapters: Adapters | None,
    ) -> None:
        """Let these engaged limits follow the queue, and so count its jobs. Of these, fair_shares
        and adapters change its order; None: not engaged."""
        if followers is not self._followers:
            for limit in followers if self._entries else ():
                if limit not in self._followers:
                    limit.queued(self._entries)
            self._followers = followers
        self._fair_shares, self._adapters = fair_shares, adapters

    def has_slot(self, view: SchedulerView) -> Callable[[Job], bool]:
        """Return a function that tells whether a waiting job's adapter may run now."""
        return (lambda job: True) if self._adapters is None else self._adapters.has_slot(view)

    def follow(self, view: SchedulerView) -> None:
        """Find the jobs that have come and gone. A second call for the same view does nothing."""
        if self._view is not None and self._view() is view:
            return
        self._view = ref(view)
        self.positions = Positions(view.waiting)
        gone, came, _, _ = self._queue.look(view.waiting)
        # No plan is made while the batch is full. A job may have run since the last plan, and wait
        # again.
        ran = [job for job in self._changed if job.generated_tokens != self.begun.get(job, 0)]
        again = {job for job in ran if job in self._entries}.difference(gone)
        came = sorted([*came, *again], key=_arrival)
        self._remove(sorted([*gone, *again], key=_arrival))
        for job in came:
            if job.watch is None:
                job.watch = self._changed
        self._coming.update(dict.fromkeys(came))
        begun = [job for job in came if job.generated_tokens]
        changed = [job for job in self._changed if job in self._coming]
        self._join([*begun, *changed, *islice(self._coming, NUM_JOINING)])

    def _join(self, jobs: Sequence[Job]) -> None:
        """Let the jobs that have not joined the order join it."""
        joining = [job for job in dict.fromkeys(jobs) if job in self._coming]
        for job in joining:
            del self._coming[job]
            self._entries[job] = None
            self._changed[job] = self.came[job] = None
            if job.generated_tokens:
                self.begun[job] = job.generated_tokens
            if job.ranked_at != self.revision:
                self._outdated.append(job)
        self.joined += joining
        for limit in self._followers if joining else ():
            limit.queued(joining)

    def _remove(self, jobs: Collection[Job]) -> None:
        leaving = [job for job in jobs if job in self._entries]
        for job in jobs:
            if job.watch is self._changed:
                job.watch = None
            self._changed.pop(job, None)
            self._coming.pop(job, None)
        for job in leaving:
            self._take_out(job)
            del self._entries[job]
            self.begun.pop(job, None)
            if job in self.came:
                del self.came[job]
            else:
                self.left[job] = None
        for limit in self._followers if leaving else ():
            limit.dequeued(leaving)

    def disband(self) -> None:
        """Let all jobs go, because another queue takes them. The limits that follow the queue, and
        may stay, forget them."""
        self._remove([*self._entries, *self._coming])

    def take_joined(self) -> list[Job]:
        """Return the jobs that have joined since the last call and still wait."""
        joined, self.joined = self.joined, []
        return [job for job in joined if job in self._entries]

    def rank_anew(self, view: SchedulerView) -> None:
        """Rank jobs again that were ranked at an older revision, at most NUM_RANKED_ANEW a plan:
        running jobs first, then by order. Until then a job's old key stands."""
        revision = self.revision
        if self._revision != revision:
            self._revision = revision
            jobs = [entry[3] for entry in self._sorted]
            self._outdated = deque((*view.running, *view.chunked_jobs, *self._moving, *jobs))
            self._outdated.extend(job for job in self._entries if job.ranked_at != revision)
        num_left = NUM_RANKED_ANEW
        while num_left and self._outdated:
            job = self._outdated.popleft()
            if job.ranked_at == revision:
                continue
            # Set first, so that a policy that raises costs only one pass.
            job.ranked_at = revision
            job.changes()
            self._policy.rank(job)
            num_left -= 1

    def settle(self, view: SchedulerView) -> None:
        """Place the jobs whose places have changed. A job that goes first joins at once."""
        self._join([job for job in self._changed if job.goes_first])
        for job in [job for job in self._changed if job in self._entries]:
            if self._keys is not None and not job.goes_first and self._keys.has(job):
                self._take_out(job)
                self._moving[job] = None
            else:
                place = place_of(job, self._policy, view)
                self._take_out(job)
                self._put_in((*place, job))
            del self._changed[job]

    def _put_in(self, entry: Entry) -> None:
        insort(self._sorted, entry)
        self._entries[entry[3]] = entry
        if self._fair_shares is not None:
            self._fair_shares.placed(entry)

    def _take_out(self, job: Job) -> None:
        self._moving.pop(job, None)
        if (entry := self._entries[job]) is None:
            return
        self._entries[job] = None
        del self._sorted[bisect_left(self._sorted, entry)]
        if self._fair_shares is not None:
            self._fair_shares.taken_out(entry)

    def num_ahead(self, job: Job) -> int:
        """Return how many jobs go before this one, without regard to tenants' turns."""
        entry = self._entries.get(job)
        return 0 if entry is None else bisect_left(self._sorted, entry)

    def walk(self, view: SchedulerView) -> Iterator[Job]:
        """Return the jobs in the order in which to serve them: by level; within a level, jobs that
        go first come by arrival, then the others by key and arrival. But tenants take turns, and
        jobs without an adapter slot are left out.

        The order depends only on which jobs wait, not on the queue's previous order, which may
        differ between tensor-parallel ranks.
        """
        skips = None if self._adapters is None else self._adapters.open(view)
        keys, entries = self._keys, iter(self._sorted)
        if keys is not None and self._moving:
            moving = _in_order(self._moving, keys, view)
            entries = merge(self._sorted, moving) if self._sorted else moving  # a merge takes long
        if self._fair_shares is None:
            return (each[3] for each in entries if skips is None or not skips(each[3]))

        def groups() -> Mapping[Group, Iterator[Entry]]:
            return keys.groups(self._moving, view) if keys else {}

        return self._fair_shares.in_turns(entries, groups, skips or (lambda job: False))

    def order(self, view: SchedulerView) -> list[int]:
        """Return the positions of the jobs in the order in which to serve them, at most
        most_ordered."""
        self.follow(view)
        self.settle(view)
        jobs = [*islice(self.walk(view), most_ordered(view))]
        return [self.positions[job] for job in jobs]

    def ordered(self, order: Sequence[int]) -> None:
        """Note that the queue was put in the order of a plan."""
        self._queue.ordered(order)
