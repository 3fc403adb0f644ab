"""Keeps the jobs of the waiting queue."""

from __future__ import annotations

from collections.abc import Sequence

from patches.engine_types import Req
from patches.listener import Listener
from sage_sched.followed import Followed, in_front
from sage_sched.job import Job
from sage_sched.plan import Plan


class WaitingJobs(Listener):
    """The jobs of the waiting queue, kept from pass to pass. Most of a long queue stays as the
    last plan left it, and costs no work.

    jobs: in the order of the queue. req_of: their requests.
    begun: requests with output tokens.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.req_of: dict[Job, Req] = {}
        self.begun: dict[Req, None] = {}
        self._queue = Followed[Req]()

    def look(self, waiting: Sequence[Req]) -> None:
        """Update the jobs for requests that have come and gone."""
        gone, came, start, end = self._queue.look(waiting)
        for req in gone:
            del self.req_of[req.sage.job]
            self.begun.pop(req, None)
        for req in came:
            self.req_of[req.sage.job] = req
            if req.output_ids:
                self.begun[req] = None
        for req in self.begun:
            # It may have run, and been retracted, while no plan was made.
            req.sage.job.grow(len(req.output_ids))
        same = self.jobs[len(self.jobs) - (end - start) :]
        first, last = waiting[:start], waiting[end:]
        self.jobs = [req.sage.job for req in first] + same + [req.sage.job for req in last]

    def planned(self, plan: Plan, seconds: float) -> None:
        """Put the jobs in the plan's order, which the queue has taken."""
        self._queue.ordered(plan.order)
        self.jobs = in_front(self.jobs, plan.order)
