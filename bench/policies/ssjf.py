"""Implements SSJF and LPT, which serve the shortest or the longest predicted answer first, without
preemption."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView


class Ssjf(Policy):
    """Speculative shortest job first (Qiu et al. 2024), by the predicted mean length. It does not
    preempt, and has no starvation bound."""

    def rank(self, job: Job) -> None:
        job.memo = job.mean_tokens()

    def key(self, job: Job, view: SchedulerView) -> float:
        assert isinstance(job.memo, float)
        return job.memo


class Lpt(Ssjf):
    """Longest processing time first (Graham 1969), by the predicted mean length. It does not
    preempt."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return -super().key(job, view)
