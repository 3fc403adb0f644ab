"""A policy for tests: as fastserve, but it cannot rank every request."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.policies.fastserve import FastServePolicy
from sage_sched.policy import register

NAME = "picky"


class PickyPolicy(FastServePolicy):
    """What it refuses keeps its place in the queue."""

    def admit(self, job: Job) -> bool:
        return job.input_tokens % 3 != 0 and super().admit(job)


def make_known() -> None:
    """Register it in this process, which is a server's."""
    register(NAME)(PickyPolicy)
