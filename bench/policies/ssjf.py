"""SSJF: the shortest predicted answer first, to its end."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView


class Ssjf(Policy):
    """Speculative shortest job first (Qiu et al. 2024): by the predicted mean length; not
    preemptive, and without a guard against starvation."""

    def on_arrival(self, job: Job) -> bool:
        """Compute its mean length."""
        if job.distribution is None:
            return False
        job.memo = job.mean_tokens()
        return True

    def key(self, job: Job, view: SchedulerView) -> float:
        """The predicted mean length."""
        assert isinstance(job.memo, float)
        return job.memo
