"""What the next tokens of jobs are worth for what they take (ProServe, section 4.2)."""

from __future__ import annotations

import numpy as np

from sage_sched.cost import Cost
from sage_sched.job import Job
from sage_sched.slo.promised import NEVER, Pair, Promised
from sage_sched.slo.slide import Floats
from sage_sched.steps.time import StepTime
from sage_sched.view import SchedulerView

# What is known of worth rests on powers of two, so that it keeps for a while: in a pass no more are
# looked at again.
_NUM_LOOKED_AT = 16
_MOST_DOUBLINGS = 64
# What an answer is worth is looked at again every so many tokens.
_INTERVAL_TOKENS = 64


def of_next_tokens(jobs: list[Pair]) -> None:
    """The paper's: the worth of the next token by what it takes."""
    for job, p in jobs:
        promise = p.promise
        weight = promise.next_weight if job.generated_tokens else promise.first_weight
        p.density = weight / p.exec_s


def of_answers(
    jobs: list[Pair],
    missing_s: Floats,
    tpot_s: Floats,
    num_running: int,
    view: SchedulerView,
    step_time: StepTime,
    cost: Cost,
) -> None:
    """Ours: that of the answer (sage_sched.slo.worth), anew for those for which anything has
    changed
    that it rests on. That is a job's age and how many tokens it takes to catch up, in powers of
    two; 0: none.

    jobs: of which the first num_running run. missing_s: by how much the next token of each will be
    late. Who is late catches up by what a decode step is shorter than the TPOT: prefills are cut so
    that it may, see ProserveParameters.catch_up. cost: of an answer by its length.
    """
    running = view.running
    kv_tokens = sum([job.input_tokens + job.generated_tokens for job in running])
    step_s = step_time.decode_s(len(running), kv_tokens) * view.pace
    catching_s = np.maximum(tpot_s - step_s, 1e-6)
    to_catch_up = np.minimum(np.maximum(missing_s, 0.0) / catching_s, 1e9)
    tokens = np.where(missing_s > 0, to_catch_up + 1, 0.5)
    late = (np.floor(np.log2(tokens)) + 1).astype(np.int64)
    ages = np.zeros(len(jobs), np.int64)
    ages[:num_running] = [
        job.generated_tokens // _INTERVAL_TOKENS + 1 for job, _ in jobs[:num_running]
    ]
    looked_at = late + _MOST_DOUBLINGS * ages
    before = np.array([p.looked_at for _, p in jobs])
    changed = np.flatnonzero(looked_at != before)
    num_left = _NUM_LOOKED_AT
    for at in changed.tolist():
        job, p = jobs[at]
        if num_left > 0 or p.looked_at == NEVER:
            num_left -= 1
            p.looked_at = int(looked_at[at])
            p.density = _density(job, p, int(late[at]), cost)


def _density(job: Job, p: Promised, doublings: int, cost: Cost) -> float:
    age = job.generated_tokens
    first = age + 1 + (0 if doublings == 0 else int(1.5 * 2.0 ** (doublings - 1)))
    if first > job.max_new_tokens:
        return 0.0
    spent_s = 0.0
    if age:
        spent_s = cost(job.input_tokens, age, job.cached_input_tokens)
    promise = p.promise
    return p.worth.density(promise.first_weight, promise.next_weight, age, first, spent_s)
