"""Keeps the jobs of the waiting queue."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from patches.engine_types import Req
from patches.listener import Listener
from sage_sched.followed import Followed, in_front
from sage_sched.job import Job
from sage_sched.plan import Plan


class WaitingJobs(Listener):
    """The jobs of the waiting queue, kept from pass to pass. Most of a long queue stays as the
    last plan left it, and costs no work.

    jobs: in the order of the queue.
    begun: requests with output tokens.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._begun: dict[Req, None] = {}
        self._queue = Followed[Req]()
        self._job_of: dict[Req, Job] = {}

    @property
    def begun(self) -> Collection[Req]:
        return self._begun.keys()

    def look(self, waiting: Sequence[Req]) -> None:
        """Update the jobs for requests that have come and gone."""
        gone, came, start, end = self._queue.look(waiting)
        for req in gone:
            del self._job_of[req]
            self._begun.pop(req, None)
        for req in came:
            self._job_of[req] = req.sage.job
            if req.output_ids:
                self._begun[req] = None
        for req in self.begun:
            # It may have run, and been retracted, while no plan was made.
            req.sage.job.grow(len(req.output_ids))
        same = self.jobs[len(self.jobs) - (end - start) :]
        job_of = self._job_of.__getitem__
        self.jobs = [*map(job_of, waiting[:start]), *same, *map(job_of, waiting[end:])]

    def planned(self, plan: Plan, seconds: float) -> None:
        """Put the jobs in the plan's order, which the queue has taken."""
        self._queue.ordered(plan.order)
        self.jobs = in_front(self.jobs, plan.order)
