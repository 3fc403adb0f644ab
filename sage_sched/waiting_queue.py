"""Keeps the waiting jobs in order from plan to plan, because sorting a long queue takes long."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Protocol
from weakref import ref

from sage_sched.adapters import Adapters
from sage_sched.fair_shares import FairShares
from sage_sched.followed import HEAD, HEAD_IF_FULL, Followed, Positions
from sage_sched.job import Job
from sage_sched.sorted_jobs import Entry, Group, Place, SortedJobs, group_of, walk
from sage_sched.view import SchedulerView

# At most this many new jobs join the order in a plan, by arrival. The others wait for the next
# plan.
NUM_JOINING = 64
# At most this many jobs are ranked again in a plan after the keys of all have changed.
NUM_RANKED_ANEW = 32
_arrival = attrgetter("arrival")


class Ranking(Protocol):
    """The parts of a policy that its queue calls, see sage_sched.policy."""

    moving: MovingKeys | None

    def key(self, job: Job, view: SchedulerView) -> float: ...

    def on_queued(self, job: Job) -> None: ...

    def on_dequeued(self, job: Job) -> None: ...

    def on_prediction(self, job: Job) -> None: ...


def place_of(job: Job, policy: Ranking, view: SchedulerView) -> Place:
    """Return the place of a job. A job that is held back (Policy.key) is behind the jobs of all
    levels."""
    if job.is_held:
        return math.inf, 0.0, job.arrival
    if job.goes_first:
        return job.level, -math.inf, job.arrival
    key = policy.key(job, view) if job.is_ranked else 0.0
    if math.isnan(key):  # the order would depend on the queue's order
        raise ValueError(f"the key of {job} is not a number")
    return math.inf if key == math.inf else job.level, key, job.arrival


def most_ordered(view: SchedulerView) -> int:
    """Return how many jobs a plan orders at most."""
    return HEAD_IF_FULL if view.batch_is_full else HEAD


class MovingKeys:
    """Orders the waiting jobs whose keys may change although the jobs do not, anew in each pass.
    A policy with a faster way has a subclass."""

    def __init__(self, policy: Ranking) -> None:
        self._policy = policy

    def has(self, job: Job) -> bool:
        """Whether the key of this ranked job changes while it waits."""
        return True

    def first(self, jobs: Collection[Job], num: int, view: SchedulerView) -> list[Entry]:
        """Return at least the first num of these jobs, in order."""
        return sorted((*place_of(job, self._policy, view), job) for job in jobs)

    def groups(self, jobs: Collection[Job], view: SchedulerView) -> dict[Group, Iterator[Entry]]:
        """Return those of the jobs whose classes share fairly, in order, by group. A job that is
        held back is in none."""
        groups: dict[Group, list[Entry]] = {}
        for entry in self.first(jobs, len(jobs), view):
            if entry[0] < math.inf and (group := group_of(entry[3])) is not None:
                groups.setdefault(group, []).append(entry)
        return {group: iter(entries) for group, entries in groups.items()}


class _Moving:
    """The jobs whose keys move, in the order of one pass. They are sorted lazily, as they are
    read."""

    def __init__(self, jobs: Collection[Job], keys: MovingKeys, view: SchedulerView) -> None:
        self._jobs, self._keys, self._view = jobs, keys, view
        self.head = keys.first(jobs, HEAD, view)

    def __iter__(self) -> Iterator[Entry]:
        yield from (head := self.head)
        if len(head) < len(self._jobs):
            self.head = self._keys.first(self._jobs, len(self._jobs), self._view)
            yield from self.head[len(head) :]


class WaitingQueue:
    """The waiting jobs of one policy, in order.

    A job is placed when it joins, and again when its place may have changed, which the job notes
    itself (Job.watch). So a plan touches only the first jobs of the order, and jobs that come, go
    or change.

    fair_shares, adapters: engaged limits of the pass (sage_sched.limits), which follow the queue.
    joined: jobs that have joined since take_joined.
    begun: waiting jobs with tokens, and how many tokens they had when they joined.
    revision: how often the keys of all jobs have changed, for example because the server's step
        times have. The jobs are then ranked again, some in each plan.
    """

    def __init__(self) -> None:
        self.fair_shares: FairShares | None = None
        self.adapters: Adapters | None = None
        self._queue = Followed[Job]()
        self._coming: dict[Job, None] = {}
        self._changed: dict[Job, None] = {}
        self._sorted = SortedJobs()
        self._entries: dict[Job, tuple[list[Entry], Entry] | None] = {}
        # Jobs whose keys move.
        self._moving: dict[Job, None] = {}
        self._outdated: deque[Job] = deque()
        self.revision = self._revision = 0
        self._view: ref[SchedulerView] | None = None
        self.positions = Positions[Job](())
        self.joined: list[Job] = []
        self.begun: dict[Job, int] = {}

    def __contains__(self, job: object) -> bool:
        return job in self._entries

    def use(self, fair_shares: FairShares | None, adapters: Adapters | None) -> None:
        """Let these limits follow the queue, and so count its jobs; None: not engaged."""
        for new, old in ((fair_shares, self.fair_shares), (adapters, self.adapters)):
            if new is not None and new is not old:
                for job in self._entries:
                    new.joined(job)
        self.fair_shares, self.adapters = fair_shares, adapters

    def has_slot(self, view: SchedulerView) -> Callable[[Job], bool]:
        """Return a function that tells whether a waiting job's adapter may run now."""
        return (lambda job: True) if self.adapters is None else self.adapters.has_slot(view)

    @property
    def _followers(self) -> list[FairShares | Adapters]:
        return [each for each in (self.fair_shares, self.adapters) if each is not None]

    def follow(self, view: SchedulerView, policy: Ranking) -> None:
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
        left = [job for job in sorted([*gone, *again], key=_arrival) if self._remove(job)]
        for job in came:  # done before any call that may raise
            if job.watch is None:
                job.watch = self._changed
        self._coming.update(dict.fromkeys(came))
        for job in left:
            for follower in self._followers:
                follower.left(job)
            policy.on_dequeued(job)
        begun = [job for job in came if job.generated_tokens]
        for job in [*begun, *islice(self._coming, NUM_JOINING)]:
            self._join(job, policy)

    def _join(self, job: Job, policy: Ranking) -> None:
        if job not in self._coming:
            return
        del self._coming[job]
        self._entries[job] = None
        self._changed[job] = None
        self.joined.append(job)
        if job.generated_tokens:
            self.begun[job] = job.generated_tokens
        if job.ranked_at != self.revision:
            self._outdated.append(job)
        for follower in self._followers:
            follower.joined(job)
        policy.on_queued(job)

    def _remove(self, job: Job) -> bool:
        """Remove a job; return whether it had joined."""
        if job.watch is self._changed:
            job.watch = None
        self._changed.pop(job, None)
        if job not in self._entries:
            del self._coming[job]
            return False
        self._take_out(job)
        del self._entries[job]
        self.begun.pop(job, None)
        return True

    def disband(self) -> None:
        """Let all jobs go, because another queue takes them. The limits that follow the queue, and
        may stay, forget them."""
        for job in [*self._entries, *self._coming]:
            if self._remove(job):
                for follower in self._followers:
                    follower.left(job)

    def take_joined(self) -> list[Job]:
        """Return the jobs that have joined since the last call and still wait."""
        joined, self.joined = self.joined, []
        return [job for job in joined if job in self._entries]

    def rank_anew(self, view: SchedulerView, policy: Ranking) -> None:
        """Rank jobs again that were ranked at an older revision, at most NUM_RANKED_ANEW a plan:
        running jobs first, then by order. Until then a job's old key stands."""
        revision = self.revision
        if self._revision != revision:
            self._revision = revision
            jobs = [entry[3] for entry in self._sorted.ranked]
            self._outdated = deque((*view.running, *view.chunked_jobs, *self._moving, *jobs))
            self._outdated.extend(job for job in self._entries if job.ranked_at != revision)
        num_left = NUM_RANKED_ANEW
        while num_left and self._outdated:
            job = self._outdated.popleft()
            if job.ranked_at == revision:
                continue
            # Set first, so that a policy that raises costs only one pass.
            job.ranked_at = revision
            if job.is_ranked:
                job.changes()
                policy.on_prediction(job)
                num_left -= 1

    def settle(self, view: SchedulerView, policy: Ranking) -> None:
        """Place the jobs whose places have changed."""
        for job in [*self._changed]:
            self._join(job, policy)
            may_move = job.is_ranked and not job.goes_first
            if may_move and (moving := policy.moving) is not None and moving.has(job):
                self._take_out(job)
                self._moving[job] = None
            else:
                place = place_of(job, policy, view)
                self._take_out(job)
                self._put_in(job, place)
            del self._changed[job]

    def _put_in(self, job: Job, place: Place) -> None:
        entry = (*place, job)
        entries = self._sorted.of(job)
        insort(entries, entry)
        self._entries[job] = entries, entry
        if self.fair_shares is not None:
            self.fair_shares.placed(entry)

    def _take_out(self, job: Job) -> None:
        self._moving.pop(job, None)
        if (found := self._entries[job]) is None:
            return
        self._entries[job] = None
        entries, entry = found
        del entries[bisect_left(entries, entry)]
        if self.fair_shares is not None:
            self.fair_shares.taken_out(entry)

    def num_ahead(self, job: Job) -> int:
        """Return how many jobs go before this one, without regard to tenants' turns."""
        if (found := self._entries.get(job)) is None:
            return 0
        jobs, entry = self._sorted, found[1]
        return bisect_left(jobs.ranked, entry) + bisect_left(jobs.unranked, entry)

    def walk(self, view: SchedulerView, policy: Ranking) -> Iterator[Job]:
        """Return the jobs in the order in which to serve them.

        The order is that of sorted_jobs.walk, but tenants take turns. Jobs without an adapter slot
        are left out.
        """
        skips = None if self.adapters is None else self.adapters.open(view)
        first_arrival = view.num_arrivals - len(view.waiting)
        keys = policy.moving
        moving = _Moving(self._moving, keys, view) if keys and self._moving else None

        def num_ahead(ranked: Entry, unranked: Entry) -> int:
            num_moving = 0 if moving is None else bisect_left(moving.head, ranked)
            num_unranked = bisect_left(self._sorted.unranked, unranked)
            return bisect_left(self._sorted.ranked, ranked) + num_moving + num_unranked

        entries = walk(self._sorted, first_arrival, moving or ())
        if self.fair_shares is None:
            return (each[3] for each in entries if skips is None or not skips(each[3]))

        def groups() -> Mapping[Group, Iterator[Entry]]:
            return keys.groups(self._moving, view) if keys else {}

        skips = skips or (lambda job: False)
        return self.fair_shares.in_turns(entries, first_arrival, groups, num_ahead, skips)

    def order(self, view: SchedulerView, policy: Ranking) -> list[int]:
        """Return the positions of the jobs in the order in which to serve them, at most
        most_ordered."""
        self.follow(view, policy)
        self.settle(view, policy)
        jobs = [*islice(self.walk(view, policy), most_ordered(view))]
        return [self.positions[job] for job in jobs]

    def ordered(self, order: Sequence[int]) -> None:
        """Note that the queue was put in the order of a plan."""
        self._queue.ordered(order)
