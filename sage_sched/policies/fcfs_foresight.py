"""First come, first served, with predictions for admission alone."""

from __future__ import annotations

from typing import ClassVar

from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView


class FcfsForesight(Policy):
    """By arrival, and nobody yields. What it gains over SGLang's `fcfs` is what admission by
    foreseen lengths (sage_sched.admission) brings without any order; what `sage` gains over it is
    the order's. A request without a prediction keeps its turn too.

    It is also what a pass goes by if its policy fails.
    """

    moves: ClassVar[bool] = True  # so that nothing is kept in the place of another policy's keys

    def key(self, job: Job, view: SchedulerView) -> float:
        """The same for all, so that arrival decides."""
        return 0.0
