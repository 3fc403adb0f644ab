"""Lets a prompt wait while another is prefilled, to reuse the KV of their common prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sage_sched.job import Job
from sage_sched.view import SchedulerView

# This many jobs at the head of the order are compared.
_NUM_COMPARED = 16


def shared_prefix_followers(order: Sequence[int], view: SchedulerView) -> list[int]:
    """Return the positions of waiting jobs that should wait for one more pass.

    Another job computes the beginning of their prompt first, and computing it twice would take
    longer than one more prefill step. That job is chunked, comes earlier in the order, or runs and
    has no token yet. (Under overlap SGLang plans a pass before the KV of the previous pass is in
    the radix tree.) A job that goes first never waits.
    """
    computing = [job for job in view.running if not job.generated_tokens] + view.chunked_jobs
    waits: list[int] = []
    for position in order[:_NUM_COMPARED]:
        job = view.waiting[position]
        if job in view.swapped or job.keeps_memory or not _is_long(job.input_tokens, job, view):
            continue
        if not job.goes_first and _shares_prefix(job, computing, view):
            waits.append(position)
        else:
            computing.append(job)
    return waits


def _shares_prefix(job: Job, computing: Iterable[Job], view: SchedulerView) -> bool:
    """Whether the job shares a long prefix with one of the jobs that are being computed."""
    return any(
        (num_tokens := view.kv.common_tokens(job, other))
        and _is_long(num_tokens, other, view)
        and _is_long(num_tokens, job, view)
        for other in computing
    )


def _is_long(num_tokens: int, job: Job, view: SchedulerView) -> bool:
    """Whether the uncached part of these tokens takes longer than the fixed time of a prefill
    step."""
    new_tokens = num_tokens - max(job.cached_tokens, job.prefilled_tokens)
    step_time = view.server.step_time
    return new_tokens * step_time.prefill_token_s > step_time.prefill_base_s
