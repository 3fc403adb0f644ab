"""How much of the KV pool requests will still need."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
        forecast = job.forecast
        if not isinstance(forecast, _Forecast):
            if job.distribution is None:
                return None
            known = job.distribution.with_tail(job.max_new_tokens)
            forecast = _Forecast(known.lengths.tolist(), np.cumsum(known.weights).tolist())
            job.forecast = forecast
        age_tokens = job.generated_tokens
        if not 0 <= age_tokens - forecast.age_tokens < _BUCKET_TOKENS:
            # Of the bucket, not of the age: it must not matter at which ages one has asked.
            bucket = age_tokens // _BUCKET_TOKENS
            forecast.look(bucket * _BUCKET_TOKENS, self._quantile, job.max_new_tokens)
        left = forecast.length_tokens - age_tokens
        if left >= _BUCKET_TOKENS:
            return left
        return max(1, min(_BUCKET_TOKENS, job.max_new_tokens - age_tokens))


@dataclass(slots=True)
class _Forecast:
    """A length distribution as lists, and the length that it foretells at the age last asked for.
    In lists and not LengthDistribution.surviving, as every pass asks for all that run."""

    lengths: list[int]
    cumulative: list[float]
    age_tokens: int = -_BUCKET_TOKENS
    length_tokens: int = 0

    def look(self, age_tokens: int, quantile: float, cap_tokens: int) -> None:
        self.age_tokens = age_tokens
        first = bisect_right(self.lengths, age_tokens)
        if first == len(self.lengths):
            # Longer than anything foreseen. To fear the cap would let a few bad forecasts close the
            # door to all.
            self.length_tokens = min(2 * age_tokens, cap_tokens)
            return
        gone = self.cumulative[first - 1] if first else 0.0
        reached = gone + (self.cumulative[-1] - gone) * quantile
        place = bisect_left(self.cumulative, reached - 1e-9, lo=first)
        self.length_tokens = self.lengths[min(place, len(self.lengths) - 1)]


def set_aside_tokens(
    held_tokens: NDArray[np.int64], left_tokens: NDArray[np.float64], page_size: int
) -> NDArray[np.float64]:
    """What to keep free for each of the running requests.

    held_tokens, left_tokens: of each, the KV that it will give back, and what is still to come.
    Together it is what is missing at the peak, if nobody joins: the first to end give back what the
    others need (after Gong et al. 2025, the Past-Future scheduler). Each has a share in proportion
    to what is to come. Both are taken in whole pages, which may be one a request too many.
    """
    if not len(left_tokens):
        return left_tokens
    held_tokens = -(-held_tokens // page_size) * page_size
    left_tokens = np.ceil(left_tokens / page_size) * page_size
    longest_first = np.argsort(-left_tokens, kind="stable")
    held = np.cumsum(held_tokens[longest_first])
    num_left = np.arange(1, len(held) + 1)
    missing = float(np.max(held + num_left * left_tokens[longest_first]) - held[-1])
    share: NDArray[np.float64] = left_tokens * (missing / max(1.0, float(left_tokens.sum())))
    return share
