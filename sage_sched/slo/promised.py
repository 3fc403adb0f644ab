"""What is known of jobs with a promise, and how much a second of serving each is worth (ProServe,
section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sage_sched.cost import Cost
from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.slo.promise import Promise
from sage_sched.slo.worth import Worth

_NEVER = -1
# Densities rest on powers of two, so that each holds for a while. A pass computes at most so many.
_NUM_LOOKED_AT = 16
_MOST_DOUBLINGS = 64
# The worth of an answer is computed anew every so many tokens.
_INTERVAL_TOKENS = 64


@dataclass(slots=True)
class Promised:
    """What is known of a job with a promise; its Job.memo.

    worth: of its answer. exec_s: seconds that its next token takes by the model of step times.
    due_s: when that token is due, by SchedulerView.now_s. looked_at: what density rests on, see
    densities_of_answers. is_urgent, may_yield, key: of the last pass.
    """

    promise: Promise
    worth: Worth
    exec_s: float
    due_s: float = math.inf
    density: float = 0.0
    looked_at: int = _NEVER
    is_urgent: bool = False
    may_yield: bool = False
    key: float = 0.0

    def forecast(self, worth: Worth, exec_s: float) -> None:
        """The forecast has changed. The job keeps its place until the next pass."""
        self.worth, self.exec_s, self.looked_at = worth, exec_s, _NEVER


Pair = tuple[Job, Promised]


def promised_of(job: Job) -> Promised | None:
    """None if the job has no promise, or is not ranked."""
    return job.memo if isinstance(job.memo, Promised) else None


def promised_among(jobs: Iterable[Job]) -> list[Pair]:
    return [(job, job.memo) for job in jobs if isinstance(job.memo, Promised)]


def densities_of_next_tokens(jobs: list[Pair]) -> None:
    """The paper's: the worth of the next token by what it takes."""
    for job, p in jobs:
        promise = p.promise
        weight = promise.next_weight if job.generated_tokens else promise.first_weight
        p.density = weight / p.exec_s


def densities_of_answers(
    jobs: list[Pair], num_running: int, missing_s: Floats, catching_s: Floats, cost: Cost
) -> None:
    """Ours: the worth of the answer (sage_sched.slo.worth). Computed anew for a job if its age has
    changed, or how many tokens it takes to catch up; both count roughly, the latter in powers of
    two (0: it is in time).

    jobs: of which the first num_running run. missing_s: by how much the next token of each will be
    late. catching_s: by how much each step brings a late one closer. cost: of an answer by its
    length.
    """
    to_catch_up = np.minimum(np.maximum(missing_s, 0.0) / catching_s, 1e9)
    tokens = np.where(missing_s > 0, to_catch_up + 1, 0.5)
    late = (np.floor(np.log2(tokens)) + 1).astype(np.int64)
    ages = np.zeros(len(jobs), np.int64)
    ages[:num_running] = [
        job.generated_tokens // _INTERVAL_TOKENS + 1 for job, _ in jobs[:num_running]
    ]
    looked_at = late + _MOST_DOUBLINGS * ages
    before = np.array([p.looked_at for _, p in jobs])
    num_left = _NUM_LOOKED_AT
    for at in np.flatnonzero(looked_at != before).tolist():
        job, p = jobs[at]
        if num_left > 0 or p.looked_at == _NEVER:
            num_left -= 1
            p.looked_at = int(looked_at[at])
            p.density = _density(job, p, int(late[at]), cost)


def _density(job: Job, p: Promised, doublings: int, cost: Cost) -> float:
    age = job.generated_tokens
    first = age + 1 + (0 if doublings == 0 else int(1.5 * 2.0 ** (doublings - 1)))
    if first > job.max_new_tokens:
        return 0.0
    spent_s = cost(job.input_tokens, age, job.cached_input_tokens) if age else 0.0
    promise = p.promise
    return p.worth.density(promise.first_weight, promise.next_weight, age, first, spent_s)
