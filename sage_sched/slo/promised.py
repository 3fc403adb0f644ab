"""What is known of jobs that were promised something."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sage_sched.job import Job
from sage_sched.slo.tdg import Promise
from sage_sched.slo.worth import Worth

NEVER = -1


@dataclass(slots=True)
class Promised:
    """What is known of a job that was promised something.

    worth: of its answer. exec_s: model seconds of its next token. due_s: when that is due, on the
    ticks' clock. looked_at: what density rests on (sage_sched.slo.densities), NEVER before.
    is_urgent, may_yield, key: of the last pass. ttft_s: its first token's, as seen.
    """

    promise: Promise
    tpot_s: float
    worth: Worth
    exec_s: float
    due_s: float = math.inf
    density: float = 0.0
    looked_at: int = NEVER
    is_urgent: bool = False
    may_yield: bool = False
    key: float = 0.0
    ttft_s: float = 0.0


Pair = tuple[Job, Promised]


def promised_of(job: Job) -> Promised | None:
    """None if it was promised nothing, or is not ranked."""
    more: Promised | None = getattr(job.memo, "more", None)
    return more


def promised_among(jobs: Iterable[Job]) -> list[Pair]:
    """Of these, those that were promised something."""
    return [
        (job, job.memo.more)  # type: ignore[attr-defined]
        for job in jobs
        if job.is_ranked and job.memo.more is not None  # type: ignore[attr-defined]
    ]
