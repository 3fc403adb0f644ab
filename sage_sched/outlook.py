"""How much of the KV pool requests will still need."""

from __future__ import annotations

from collections.abc import Sequence

from sage_sched.job import Job

# A forecast holds for so many tokens of age; there is always as much to come.
_BUCKET_TOKENS = 16


class Outlook:
    """Of the answers of one engine, by their predicted lengths."""

    def __init__(self, quantile: float) -> None:
        """quantile: of the length that an answer of its age will have, above 0."""
        self._quantile = quantile

    def left_tokens(self, job: Job) -> int | None:
        """How many tokens are still to come, at most what the cap leaves; None where nothing is
        known of the job."""
        if job.distribution is None:
            return None
        # Of the bucket, not of the age: it must not matter at which ages one has asked.
        age_tokens = job.generated_tokens // _BUCKET_TOKENS * _BUCKET_TOKENS
        if job.outlook_memo[0] != age_tokens:
            job.outlook_memo = (age_tokens, self._length_tokens(job, age_tokens))
        left = max(job.outlook_memo[1] - job.generated_tokens, _BUCKET_TOKENS)
        return max(1, min(left, job.max_new_tokens - job.generated_tokens))

    def _length_tokens(self, job: Job, age_tokens: int) -> int:
        assert job.distribution is not None
        known = job.distribution.with_tail(job.max_new_tokens).surviving(age_tokens)
        # Longer than anything foreseen: it may go on to its cap.
        return job.max_new_tokens if known is None else known.quantile(self._quantile)


def set_aside_tokens(running: Sequence[tuple[int, float]]) -> list[float]:
    """What to keep free for each of the running requests.

    running: (KV tokens that it will give back, tokens still to come). Together it is what is
    missing at the peak, if nobody joins: the first to end give back what the others need (after
    Gong et al. 2025, the Past-Future scheduler). Each has a share in proportion to what is to come.
    """
    peak, held = 0.0, 0
    longest_first = sorted(((left, tokens) for tokens, left in running), reverse=True)
    for num_left, (left, tokens) in enumerate(longest_first, start=1):
        held += tokens
        peak = max(peak, held + num_left * left)
    to_come = sum(left for _, left in running)
    return [(peak - held) * left / max(1.0, to_come) for _, left in running]
