"""A policy for tests: as fastserve, but it cannot rank every request."""

from __future__ import annotations

from pathlib import Path

from sage_sched.job import Job
from sage_sched.policies.fastserve import FastServe
from tests.engine import plugins

NAME = "picky"


class Picky(FastServe):
    """What it refuses goes first come, first served."""

    def on_arrival(self, job: Job) -> bool:
        return job.input_tokens % 3 != 0 and super().on_arrival(job)


def install(folder: Path) -> dict[str, str]:
    """The environment of servers that know it."""
    return plugins.install_policy(folder, NAME, f"{__name__}:{Picky.__name__}")
