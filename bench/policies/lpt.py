"""LPT: serves the longest predicted answer first, without preemption."""

from __future__ import annotations

from bench.policies.ssjf import Ssjf
from sage_sched.job import Job
from sage_sched.view import SchedulerView


class Lpt(Ssjf):
    """Longest processing time first (Graham 1969), by the predicted mean length. Not preemptive."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return -super().key(job, view)
