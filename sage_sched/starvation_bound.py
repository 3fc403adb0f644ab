"""Bounds how often a request is overtaken."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable

import numpy as np

from sage_sched.job import Job
from sage_sched.limit import Limit
from sage_sched.view import SchedulerView


class StarvationBound(Limit):
    """Counts the work done for each job, and finds the jobs that have passed the bound.

    Since a job came, the server has worked (in tokens, prefill and decode) for jobs that came
    before it, for the job itself, and for later jobs. The job passes the bound, once and for all,
    if at the beginning of a scheduling pass

        work since it came > (1 + regret) * (the part of it for jobs before it) + one batch

    A batch is the number of KV tokens that running jobs hold at that moment. From then on the job
    goes before all jobs of its level that have not passed their bounds, and is preempted for no
    other job of its level. Jobs past their bounds go by arrival (sage_sched.waiting_queue).

    Theorem: let k, of the same level, overtake j: k came after j, and is admitted (or resumed)
    while j waits. Then no pass until then has seen j past its bound: at each of them the server had
    done at most 1 + regret times the work for jobs before j, plus a batch.

    Proof: A pass first checks all bounds, then orders, then admits. Suppose that this pass or an
    earlier one had seen j past its bound. Then j would go first, because this is never taken back.
    Jobs past their bound are first in the order, by arrival, so j is ahead of k whether k is past
    its own bound or not. A pass admits the first jobs of its order, up to one for which there is no
    room, or after which the pass prefills no more (sage_sched.admission). So k is not admitted
    while j waits. Once past its bound, j does not begin to wait by being preempted for another job.
    If it is preempted because memory runs out, all jobs behind it that can be preempted were
    preempted before it, and wait behind it now. It remains to show that the bound is computed
    exactly. Jobs come one after another, so all work that was done when j came was for jobs before
    it. Hence the work since, less the Job.served_tokens of j and of all jobs after it, was for jobs
    before it. QED.

    With a regret of 0 each job passes its bound as it comes: first come, first served. With a
    regret of infinity no job ever does.

    next_tokens: no further job passes its bound before the server's work reaches this, unless
        requests end.
    """

    def __init__(self, regret: float) -> None:
        self._regret = regret
        # The unfinished jobs by arrival, and at most as many ended ones.
        self._jobs: list[Job] = []
        self._ended: set[Job] = set()
        # For each job: the server's work when counting began (its arrival, or the first look), the
        # work for the job, and the work for dropped jobs between it and the next job here. The last
        # is reduced by the job's own work until counting began.
        self._starts, self._owns, self._extras = array("q"), array("q"), array("q")
        self._places: dict[Job, int] = {}
        self._has_looked = False
        # Of the last look at the jobs: the work until then, the locked tokens, and the least work
        # that is left until a job passes its bound.
        self._last = 0, 0, -math.inf

    def is_like(self, other: Limit) -> bool:
        return isinstance(other, StarvationBound) and self._regret == other._regret

    def arrived(self, job: Job) -> None:
        """Note that a job has arrived, after all jobs before it."""
        if self._regret == 0:
            job.pass_starvation_bound()
        elif self._regret < math.inf:
            self._append(job, job.served_at_arrival_tokens, 0)

    def _append(self, job: Job, start: int, extra: int) -> None:
        self._places[job] = len(self._jobs)
        self._jobs.append(job)
        self._starts.append(start)
        self._owns.append(job.served_tokens)
        self._extras.append(extra)

    def queued(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.served_tokens:
                self._served(job)

    def _served(self, job: Job) -> None:
        """Note that the server has worked for a job: it runs, or has run and waits again."""
        if (place := self._places.get(job)) is not None:
            self._owns[place] = job.served_tokens

    def ended(self, job: Job, now_s: float) -> None:
        if not self._jobs:
            return
        self._served(job)
        self._ended.add(job)
        if 2 * len(self._ended) >= len(self._jobs):
            self._fold()

    def _fold(self) -> None:
        """Drop the ended jobs. Their work still counts for all jobs that came before them."""
        jobs, starts, extras = self._jobs, self._starts, self._extras
        self._jobs, self._places = [], {}
        self._starts, self._owns, self._extras = array("q"), array("q"), array("q")
        for job, start, extra in zip(jobs, starts, extras, strict=True):
            if job not in self._ended:
                self._append(job, start, extra)
            elif self._jobs:
                self._extras[-1] += job.served_tokens + extra
        self._ended.clear()

    def look(self, view: SchedulerView, begun: Collection[Job]) -> None:
        """Find the jobs that have passed their bound."""
        last_tokens, near_tokens = self._last[0], self._near_tokens(view)
        self.next_tokens = min(self.next_tokens, last_tokens + near_tokens)
        # Every job has used at most half of what its bound left it.
        if 2 * (view.served_tokens - last_tokens) <= near_tokens:
            return
        self.next_tokens = math.inf
        if not self._jobs:
            return
        owns, place_of = self._owns, self._places.get
        for job in view.running if view.chunked is None else (*view.running, view.chunked):
            if (place := place_of(job)) is not None:
                owns[place] = job.served_tokens
        own = np.frombuffer(self._owns, np.int64)
        if not self._has_looked:
            self._has_looked = True
            self._starts = array("q", [view.served_tokens] * len(own))
            self._extras = array("q", (-own).tolist())
        served = own + np.frombuffer(self._extras, np.int64)
        behind = np.cumsum(served[::-1])[::-1]  # for each job and all jobs after it
        before = view.served_tokens - np.frombuffer(self._starts, np.int64) - behind
        left_tokens = self._regret * before + max(1, view.locked_tokens) - behind
        passed = left_tokens < 0
        least_tokens = left_tokens.min(initial=math.inf, where=~passed)
        self.next_tokens = view.served_tokens + least_tokens
        self._last = view.served_tokens, view.locked_tokens, float(least_tokens)
        for place in np.flatnonzero(passed).tolist():
            if not (job := self._jobs[place]).passed_starvation_bound:
                job.pass_starvation_bound()

    def _near_tokens(self, view: SchedulerView) -> float:
        """Return the least work, from the last look on, until a job may pass its bound. This falls
        as the batch shrinks. A job that has come since the last look began with a batch."""
        _, locked_tokens, left_tokens = self._last
        return min(left_tokens, locked_tokens) - max(0, locked_tokens - view.locked_tokens)
