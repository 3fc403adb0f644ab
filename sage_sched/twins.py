"""Prompts that begin alike: what one request computes right now, no other computes beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sage_sched.job import Job
from sage_sched.view import SchedulerView

# Of so many of the first to serve it is asked whether they have a twin.
_NUM_COMPARED = 16


def twins_of_those_served(order: Sequence[int], view: SchedulerView) -> list[int]:
    """The positions of waiting jobs that had better wait for one more pass.

    These are jobs of whose prompt another one computes a beginning first, if to compute that twice
    takes longer than one more prefill step. Others compute: the chunked one, those without a token
    yet (SGLang's overlap plans a pass before the radix tree has what the last one computed), and
    those before it in the order, which is of the waiting that may enter. One that is promised its
    turn never waits.
    """
    begun = [job for job in view.running if not job.generated_tokens]
    if view.chunked is not None:
        begun.append(view.chunked)
    computing: list[tuple[Job, int | Job]] = [(job, job) for job in begun]
    waits: list[int] = []
    for position in order[:_NUM_COMPARED]:
        job = view.waiting[position]
        if job in view.swapped or job.keeps_memory or not _is_long(job.input_tokens, job, view):
            continue
        if not job.is_promised and _has_twin(position, job, computing, view):
            waits.append(position)
        else:
            computing.append((job, position))
    return waits


def _has_twin(
    position: int, job: Job, computing: Iterable[tuple[Job, int | Job]], view: SchedulerView
) -> bool:
    """computing: jobs, and by what common_tokens knows each."""
    for other, where in computing:
        num_tokens = view.common_tokens(position, where)
        if num_tokens and _is_long(num_tokens, other, view) and _is_long(num_tokens, job, view):
            return True
    return False


def _is_long(num_tokens: int, job: Job, view: SchedulerView) -> bool:
    """Whether so many tokens, less those of them that a job needs not compute, take longer than a
    prefill step does at least."""
    new_tokens = num_tokens - max(job.cached_tokens, job.prefilled_tokens)
    step_time = view.server.step_time
    return new_tokens * step_time.prefill_token_s > step_time.prefill_base_s
