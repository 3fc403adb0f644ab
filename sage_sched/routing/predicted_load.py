"""What a server tells routers of its queue: tokens to be made for those that wait."""

from __future__ import annotations

from collections.abc import Iterable

from sage_sched.job import Job


def answer_tokens(waiting: Iterable[Job]) -> int:
    """Of the answers of those that wait, as far as they are foreseen; one of which nothing is known
    counts for nothing. One that outlived all that was foreseen goes on for as long as it has gone
    on (Lindy's law)."""
    return round(sum(_left_tokens(job) for job in waiting))


def _left_tokens(job: Job) -> float:
    if job.distribution is None:
        return 0.0
    age_tokens = job.generated_tokens
    most_tokens = max(0, job.max_new_tokens - age_tokens)
    longer = job.distribution.surviving(age_tokens) if age_tokens else job.distribution
    left_tokens = float(age_tokens) if longer is None else longer.mean() - age_tokens
    return min(left_tokens, most_tokens)
