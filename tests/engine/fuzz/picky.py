"""A policy for tests: as fastserve, but it cannot rank every request."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.policies.fastserve import FastServePolicy
from sage_sched.policy import register

NAME = "picky"


@register(NAME)
class PickyPolicy(FastServePolicy):
    """What it refuses keeps its place in the queue."""

    def admit(self, job: Job) -> bool:
        return job.input_tokens % 3 != 0 and super().admit(job)
