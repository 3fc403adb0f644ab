"""When a request is promised that nobody overtakes it any more."""

from __future__ import annotations

import math
from array import array

import numpy as np

from sage_sched.job import Job
from sage_sched.view import SchedulerView


class Promises:
    """Keeps account of whom the server has worked for, and promises jobs their turn.

    Of all work (tokens, prefill and decode) that the server has done since a job came, some was for
    jobs that came before it, the rest for itself and later ones. It is promised its turn once, at a
    pass that orders the jobs,

        work since it came > (1 + regret) * (of that, for those before it) + one batch

    where a batch is the KV tokens that running jobs hold at that pass. From then on it goes before
    all jobs that are not promised, among promised ones by arrival (sage_sched.order), and yields to
    nobody.

    Theorem: let k overtake j: k came after j, and is let in (enters, or resumes) while j waits.
    Then no pass until then has seen j's bound passed: by each of them the server had done at most
    1 + regret times the work for those before j, and a batch.

    Proof: a pass first looks at all bounds, then orders, then lets in. Had this pass or one before
    seen j's bound passed, j would be promised, as a promise is never taken back. Promised jobs are
    first in the order, by arrival, so j is ahead of k whether k is promised or not; and those that
    a pass lets in are the first of its order, up to one for which there is no room, or after which
    the pass prefills no more (sage_sched.preemption.plan_turns). So k is not let in while j waits.
    Nor does j, promised, begin to wait by yielding; if it leaves as memory runs out, all who are
    behind it and can leave have left before it, and wait behind it now. What remains is that the
    bound is computed exactly. Jobs come one after another, so all that the server had done when j
    came was for those before it. Hence what it has done since, less the Job.served_tokens of j and
    all that came after it, was for those before it. QED.

    A promise does not create memory. If a swapped job has found no room, and no running job could
    give any back, others enter (sage_sched.scheduling_pass).

    A policy that takes over from another does not know what became of the work until then. So the
    accounts of the jobs that it meets begin at its first pass, as if they had come then.

    With regret 0 each job is promised its turn as it comes: first come, first served. With infinity
    none is.
    """

    def __init__(self, regret: float) -> None:
        self._regret = regret
        # The unfinished jobs by arrival, and some that have ended; at most as many again.
        self._jobs: list[Job] = []
        self._ended: set[Job] = set()
        # Of each, the server's work when its account began; the work for it; and that for ended
        # jobs behind it, up to the next of these jobs, less its own until its account began.
        self._starts, self._owns, self._extras = array("q"), array("q"), array("q")
        self._places: dict[Job, int] = {}
        self._has_looked = False

    def arrived(self, job: Job) -> None:
        """A job has come, after all that came before it. Once for each."""
        if self._regret == 0:
            job.promise()
        elif self._regret < math.inf:
            self._append(job, job.served_at_arrival_tokens, 0)

    def _append(self, job: Job, start: int, extra: int) -> None:
        self._places[job] = len(self._jobs)
        self._jobs.append(job)
        self._starts.append(start)
        self._owns.append(job.served_tokens)
        self._extras.append(extra)

    def served(self, job: Job) -> None:
        """A job runs, or has run and waits again: the server has worked for it."""
        if (place := self._places.get(job)) is not None:
            self._owns[place] = job.served_tokens

    def ended(self, job: Job) -> None:
        """A job has ended, and is served no more. Once for each."""
        if not self._jobs:
            return
        self.served(job)
        self._ended.add(job)
        if 2 * len(self._ended) >= len(self._jobs):
            self._fold()

    def _fold(self) -> None:
        """Drop the ended jobs. Their work stays in the accounts of all that came before them."""
        jobs, starts, extras = self._jobs, self._starts, self._extras
        self._jobs, self._places = [], {}
        self._starts, self._owns, self._extras = array("q"), array("q"), array("q")
        for job, start, extra in zip(jobs, starts, extras, strict=True):
            if job not in self._ended:
                self._append(job, start, extra)
            elif self._jobs:
                self._extras[-1] += job.served_tokens + extra
        self._ended.clear()

    def look(self, view: SchedulerView) -> None:
        """Promise their turn to jobs whose bound is passed, before the jobs are ordered."""
        if not self._jobs:
            return
        for job in (*view.running, *view.chunked_jobs):
            self.served(job)
        own = np.frombuffer(self._owns, np.int64)
        if not self._has_looked:
            self._has_looked = True
            self._starts = array("q", [view.served_tokens] * len(own))
            self._extras = array("q", (-own).tolist())
        served = own + np.frombuffer(self._extras, np.int64)
        behind = np.cumsum(served[::-1])[::-1]  # for each and all after it
        before = view.served_tokens - np.frombuffer(self._starts, np.int64) - behind
        passed = behind > self._regret * before + max(1, view.locked_tokens)
        for place in np.flatnonzero(passed).tolist():
            if not (job := self._jobs[place]).has_promise:
                job.promise()
