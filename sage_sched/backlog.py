"""Estimates how much work a server still has to do for its requests."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sage_sched.job import Job
from sage_sched.steps import ServerFacts


def expected_left_tokens(job: Job, expected_share: float) -> float:
    """Return the expected number of tokens that the job's answer still gets.

    expected_share: the expected length as a share of the cap, if the length is unknown (SGLang's
    new_token_ratio).
    """
    age_tokens, most_left = job.generated_tokens, max(1, job.max_new_tokens - job.generated_tokens)
    if job.has_fixed_length:
        return most_left
    if not job.is_predicted:
        return max(1.0, expected_share * most_left)
    known = job.distribution if not age_tokens else job.distribution.surviving(age_tokens)
    # An answer past the longest known length is expected to double.
    mean_tokens = 2 * age_tokens if known is None else known.mean()
    return min(max(1.0, mean_tokens - age_tokens), most_left)


def backlog_s(unfinished: Iterable[Job], expected_share: float, server: ServerFacts) -> float:
    """Return the seconds until about nine in ten of these jobs are done, if no others come.

    Assumes that all jobs decode in batches of the largest size that fits, that each is halfway
    through the rest of its answer, and that each has a prefill step of its own. The last few jobs
    take longer, because the batch shrinks.
    """
    prefill_s = total_left = total_kv = longest_left = 0.0
    num_jobs = 0
    for job in unfinished:
        left = expected_left_tokens(job, expected_share)
        num_jobs += 1
        total_left += left
        longest_left = max(longest_left, left)
        total_kv += job.input_tokens + job.generated_tokens + left / 2
        if not job.generated_tokens:
            done_tokens = max(job.cached_input_tokens, job.prefilled_tokens)
            prefill_s += server.recompute_s(job.input_tokens, min(done_tokens, job.input_tokens))
    if not num_jobs:
        return 0.0
    mean_kv = total_kv / num_jobs
    fit = max(1, math.floor(server.kv_pool_tokens / mean_kv))
    batch = min(num_jobs, server.max_running_requests, fit)
    num_steps = max(total_left / batch, longest_left)
    return prefill_s + num_steps * server.step_time.decode_s(batch, int(batch * mean_kv))
