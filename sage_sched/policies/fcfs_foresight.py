"""First come, first served, with predictions for admission alone."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.policy import Policy, register


@register("fcfs-foresight")
class FcfsForesightPolicy(Policy):
    """By arrival, and nobody yields. What it gains over SGLang's `fcfs` is what admission by
    foreseen lengths (sage_sched.outlook) brings without any order; what `sage` gains over it is the
    order's. A request without a prediction keeps its turn too.
    """

    def admit(self, job: Job) -> bool:
        return True

    def key(self, job: Job, served_tokens: int) -> float:
        return 0.0
