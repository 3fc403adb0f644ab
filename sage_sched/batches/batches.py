"""Decides which jobs of batches go before online requests, and which behind them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from sage_sched.batches.batch import Batch, due_s
from sage_sched.job import BEHIND, Job
from sage_sched.limit import Limit
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView

# The interval between decisions; the end of a job brings another. With more than _MANY jobs one
# takes a millisecond of the host, so the interval grows with their number, and ends do not count.
_INTERVAL_S, _MANY = 0.25, 500
# Moving averages: the weight of the latest interval, and the seconds that the time from token to
# token is averaged over, because prefills make it uneven.
_RECENT, _EVEN_S = 0.1, 20.0
# Number of batches that are remembered.
_MOST = 100
# Finish times that differ by less are the same: each request states its own time left.
_SAME_S = 1.0

Key = tuple[str, str]


class TooLate(NamedTuple):
    """Says why a batch is refused: it takes at least least_s, and only left_s are left."""

    name: str
    least_s: float
    left_s: float


class Report(NamedTuple):
    """The progress of a batch. Times are from now on; below 0: in the past.

    num_first: how many of its jobs go first at present. predicted_in_s: when it is predicted to be
    done, or was done.
    """

    batch: str
    num_requests: int
    num_arrived: int
    num_ended: int
    num_first: int
    done_in_s: float
    predicted_in_s: float
    in_time: bool


class Batches(Limit):
    """Lets the jobs of a batch run behind all others, and as many of them first as it needs to be
    done in time (Batch.needed).

    A job that goes first preempts others if it finds no room. If the policy preempts at all, jobs
    behind are preempted for others at any price. While other requests are served, the jobs of a
    batch start some at a time (Batch.open).

    Batches of different tenants are different. The first job of a batch states its size and time.
    Jobs beyond its size run behind all others, and nothing is promised to them.
    """

    is_engaged = False

    def __init__(self) -> None:
        self._batches: dict[Key, Batch] = {}
        # Refused batches: when they should have been done, how long they take, and their sizes.
        self._refused: dict[Key, tuple[float, float, int]] = {}
        self._token_s = 0.0
        self._ages: tuple[float, dict[Job, int]] = math.inf, {}
        self._looked_s = -math.inf
        self._has_changed = False

    def concerns(self, job: Job) -> bool:
        return job.batch is not None

    def arrived(self, job: Job) -> None:
        if job.batch is None:
            return
        _place(job, is_due=False, is_held=False)
        key = _key(job)
        batch = self._batches.get(key)
        if batch is None or (batch.is_over(job.arrival_s) and due_s(job) > batch.done_s + _SAME_S):
            self._batches.pop(key, None)
            batch = self._batches[key] = Batch(job.batch, job)
            self._forget()
            self._has_changed = True
        if batch.num_arrived < batch.part.num_requests:
            batch.add(job)

    def _forget(self) -> None:
        idle = [key for key, batch in self._batches.items() if batch.num_arrived and not batch.jobs]
        for key in idle[: max(0, len(self._batches) - _MOST)]:
            del self._batches[key]

    def ended(self, job: Job, now_s: float) -> None:
        if (batch := self.of(job)) is not None and job in batch.jobs:
            batch.end(job, now_s)
            self._has_changed = True

    def withdrawn(self, job: Job) -> None:
        """Note that a job was aborted or refused, before it ends."""
        if (batch := self.of(job)) is not None and job in batch.jobs:
            batch.withdraw(job)
            if not batch.num_arrived:
                del self._batches[_key(job)]

    def of(self, job: Job) -> Batch | None:
        """Return the batch of a job, or None."""
        return None if job.batch is None else self._batches.get(_key(job))

    def may_refuse(self, job: Job) -> bool:
        """Whether the latest job is the first of its batch. No other is refused."""
        batch = self.of(job)
        return batch is not None and batch.num_arrived == 1 and job in batch.jobs

    def refuses(self, job: Job, server: ServerFacts, now_s: float) -> TooLate | None:
        """Decide about the latest job; None admits it.

        If it is the first of its batch, the batch is refused if the whole server could not serve it
        in time, together with the batches that have to be done before it.
        """
        if not self.may_refuse(job):
            return None
        batch = self._batches[_key(job)]
        batch.look()
        key, done_s, size = _key(job), batch.done_s, batch.part.num_requests
        others = (b for b in self._batches.values() if b is not batch and b.jobs)
        earlier = [b for b in others if now_s < b.done_s <= done_s]
        least_s = batch.least_s(server, now_s, sum(b.left_tokens(now_s) for b in earlier))
        refused_s, least_then_s, size_then = self._refused.get(key, (-math.inf, 0.0, 0))
        if done_s <= refused_s + _SAME_S and size >= size_then:
            least_s = max(least_s, least_then_s)
        if least_s <= done_s - now_s:
            return None
        del self._batches[key]
        self._refused.pop(key, None)
        self._refused[key] = done_s, least_s, size
        while len(self._refused) > _MOST:
            del self._refused[next(iter(self._refused))]
        return TooLate(batch.part.name, least_s, done_s - now_s)

    def reports(self, server: ServerFacts, now_s: float) -> list[Report]:
        """Return the progress of all batches that are remembered, by their first arrivals."""
        return [self.report(batch, server, now_s) for batch in self._batches.values()]

    def report(self, batch: Batch, server: ServerFacts, now_s: float) -> Report:
        """Return the progress of a batch."""
        done_in_s = batch.done_s - now_s
        if batch.is_over(now_s):
            predicted_in_s = batch.ended_s - now_s
        elif self._token_s and (batch.num_running or batch.num_due):
            predicted_in_s = batch.left_in_s(now_s, self._token_s, server.step_time)
        else:
            predicted_in_s = batch.least_s(server, now_s)
        name, num_requests = batch.part.name, batch.part.num_requests
        return Report(
            name, num_requests, batch.num_arrived, batch.num_ended, batch.num_due,
            done_in_s, predicted_in_s, predicted_in_s <= done_in_s,
        )  # fmt: skip

    def look(self, view: SchedulerView, begun: Collection[Job]) -> None:
        self.next_s = math.inf
        number = sum(len(batch.jobs) for batch in self._batches.values())
        if not number:
            return
        times = max(1.0, number / _MANY)
        at_s = self._looked_s + times * _INTERVAL_S
        if view.now_s >= at_s or (self._has_changed and times == 1.0):
            in_batches = [job for job in view.running if self._counts(job)]
            numbers = Counter(_key(job) for job in in_batches)
            self._measure(view, numbers)
            self._decide(view)
            self._looked_s, self._has_changed = view.now_s, False
        self.next_s = self._looked_s + times * _INTERVAL_S

    def _counts(self, job: Job) -> bool:
        """Whether a job is within the promised size of its batch."""
        return (batch := self.of(job)) is not None and job in batch.jobs

    def _measure(self, view: SchedulerView, numbers: Counter[Key]) -> None:
        """Measure the time from token to token, by the job that ran longest.

        numbers: how many jobs of each batch run.
        """
        at_s, ages = self._ages
        seconds = view.now_s - at_s
        if not self._token_s:
            self._token_s = _step_s(view)
        elif 0 <= seconds < _INTERVAL_S:
            return
        num_tokens = max(
            (job.generated_tokens - ages.get(job, math.inf) for job in view.running), default=0
        )
        if num_tokens > 0 and 0 < seconds < 60:
            weight = min(1.0, seconds / _EVEN_S)
            self._token_s += weight * (seconds / num_tokens - self._token_s)
        self._ages = view.now_s, {job: job.generated_tokens for job in view.running}
        for key, batch in self._batches.items():
            if batch.jobs:
                number = numbers[key]
                batch.num_running += (
                    _RECENT * (number - batch.num_running) if batch.num_running else number
                )

    def _decide(self, view: SchedulerView) -> None:
        running = {*view.running}
        is_shared = any(job.batch is None for job in (*view.waiting, *view.running))
        token_s = max(self._token_s, _step_s(view))
        for batch in self._batches.values():
            if not batch.jobs:
                continue
            batch.look()
            batch.num_due, steps = batch.needed(view.now_s, token_s, view.server.step_time)
            number = batch.open(view.now_s, running) if is_shared else len(batch.jobs)
            order = batch.order(number, steps, running)
            due, beside = {*order[: batch.num_due]}, {*order}
            for job in batch.jobs:
                _place(job, is_due=job in due, is_held=job not in beside)


def _step_s(view: SchedulerView) -> float:
    return view.server.step_time.decode_s(len(view.running), view.running_kv_tokens)


def _place(job: Job, *, is_due: bool, is_held: bool) -> None:
    own = job.level - BEHIND if job.level > BEHIND // 2 else job.level
    job.put(own if is_due else own + BEHIND, is_due, is_held)


def _key(job: Job) -> Key:
    assert job.batch is not None
    return job.hints.tenant, job.batch.name
