"""First come, first served, with the pool filled."""

from __future__ import annotations

from typing import ClassVar

from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView


class FcfsFill(Policy):
    """By arrival, and nobody yields to another. What it gains over SGLang's `fcfs` is what it
    brings to fill the pool (sage_sched.admission); what `sage` gains over it is the order's. A
    request without a prediction keeps its turn too.

    It is also what a pass goes by if its policy fails.
    """

    moves: ClassVar[bool] = True  # so that nothing is kept in the place of another policy's keys

    def key(self, job: Job, view: SchedulerView) -> float:
        """The same for all, so that arrival decides."""
        return 0.0
