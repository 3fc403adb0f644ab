"""When a request is promised that nobody overtakes it any more."""

from __future__ import annotations

import math
from bisect import bisect_left

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
    a pass lets in are the first of its order, up to one that there is no room for. So k is not let
    in while j waits. Nor does j, promised, begin to wait by yielding; if it leaves as memory runs
    out, all who are behind it and can leave have left before it, and wait behind it now. What
    remains is that the bound is computed exactly. Jobs come one after another, so all that the
    server had done when j came was for those before it. Hence what it has done since, less the
    Job.served_tokens of j and all that came after it, was for those before it. QED.

    A promise does not create memory. If a swapped job has found no room, and no running job could
    give any back, others enter (sage_sched.scheduling_pass).

    With regret 0 each job is promised its turn as it comes: first come, first served. With infinity
    none is.
    """

    def __init__(self, regret: float) -> None:
        self._regret = regret
        # By arrival, from the first unfinished one or an earlier one, and the work that the server
        # had done when each came.
        self._jobs: list[Job] = []
        self._served_at_arrival = np.zeros(0, np.int64)

    def arrived(self, job: Job) -> None:
        """A job has come, after all that came before it. Once for each."""
        if self._regret == 0:
            job.promise()
        elif self._regret < math.inf:
            self._jobs.append(job)
            served_tokens = job.served_at_arrival_tokens
            self._served_at_arrival = np.append(self._served_at_arrival, served_tokens)

    def look(self, view: SchedulerView) -> None:
        """Promise their turn to jobs whose bound is passed, before the jobs are ordered."""
        if not self._jobs:
            return
        self.forget(view)
        served = np.array([job.served_tokens for job in self._jobs], np.int64)
        behind = np.cumsum(served[::-1])[::-1]  # for each and all after it
        before = view.served_tokens - self._served_at_arrival - behind
        passed = behind > self._regret * before + max(1, view.locked_tokens)
        for place in np.flatnonzero(passed).tolist():
            self._jobs[place].promise()

    def forget(self, view: SchedulerView) -> None:
        """Drop jobs that came before the first unfinished one, if that is worth the search. If the
        view does not know one of them (its grammar may not be ready), it is promised its turn."""
        unfinished = [*view.waiting, *view.running, *view.chunked_jobs]
        if len(self._jobs) <= 2 * len(unfinished) + 64:
            return
        first = min((job.arrival for job in unfinished), default=math.inf)
        num_gone = bisect_left(self._jobs, first, key=lambda job: job.arrival)
        for job in self._jobs[:num_gone]:
            job.promise()
        del self._jobs[:num_gone]
        self._served_at_arrival = self._served_at_arrival[num_gone:]
