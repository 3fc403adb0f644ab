"""How much work a server has yet to do for the requests that have come."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sage_sched.job import Job
from sage_sched.steps import ServerFacts


def expected_left_tokens(job: Job, expected_share: float) -> float:
    """Of its answer, on average still to come. expected_share: of the cap, where nothing is known
    of its length (SGLang's new_token_ratio)."""
    age_tokens, cap_leaves = job.generated_tokens, max(1, job.max_new_tokens - job.generated_tokens)
    if job.has_fixed_length:
        return cap_leaves
    if job.distribution is None:
        return max(1.0, expected_share * cap_leaves)
    known = job.distribution if not age_tokens else job.distribution.surviving(age_tokens)
    # Longer than all that were alike: there is as much to come as there was.
    mean_tokens = 2 * age_tokens if known is None else known.mean()
    return min(max(1.0, mean_tokens - age_tokens), cap_leaves)


def backlog_s(unfinished: Iterable[Job], expected_share: float, server: ServerFacts) -> float:
    """Seconds until some nine in ten of these jobs are done, if no others come.

    As if all decoded in batches as large as fit, at half of what is left of them, and each had a
    prefill step of its own. The last few take longer, as the batch gets smaller.
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
