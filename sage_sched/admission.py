"""How much of the KV pool requests will still need."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sage_sched.correction import Correction
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job

# A forecast holds for so many tokens of age; there is always as much to come.
_INTERVAL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Admission:
    """What admission counts on, in the engine and in the simulator.

    quantile: of the length that an answer of its age will have; 0 leaves all to SGLang, which asks
        for a waiting request's whole cap, and sets aside the same share of the cap for each that
        runs.
    clip_tokens: the most that is expected of any answer
        (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
    correction: what answers that have ended say of the forecasts.
    """

    quantile: float
    clip_tokens: int
    correction: Correction = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "correction", Correction(self.quantile))

    def ended(self, job: Job) -> None:
        """Its answer is complete, at its present age. Not for an aborted one: its length says
        nothing."""
        if self._is_foreseen(job) and job.distribution is not None:
            # By the prompt alone, whatever was seen of it later.
            said_tokens = _by_prompt(job, job.distribution).quantile_tokens(0, self.quantile)
            assert said_tokens is not None
            self.correction.ended(int(said_tokens), job.generated_tokens, job.max_new_tokens)

    def foreseen_tokens(self, job: Job) -> int | None:
        """How many tokens of its answer are still to come, at most what the cap leaves; None if
        nothing is known of them."""
        foreseen = self._foreseen(job)
        if foreseen is None:
            return None
        # What was seen of the answer itself needs no correction by what others turned out to be.
        factor = self.correction.factor if job.refined is None else 1.0
        age_tokens = job.generated_tokens
        if (
            factor != foreseen.factor
            or not 0 <= age_tokens - foreseen.age_tokens < _INTERVAL_TOKENS
        ):
            # Of the interval, not of the age: it must not matter at which ages one has asked.
            start = age_tokens // _INTERVAL_TOKENS * _INTERVAL_TOKENS
            foreseen.look(start, self.quantile, factor, job.max_new_tokens)
        left = foreseen.length_tokens - age_tokens
        if left >= _INTERVAL_TOKENS:
            return left
        return max(1, min(_INTERVAL_TOKENS, job.max_new_tokens - age_tokens))

    def _foreseen(self, job: Job) -> _Foreseen | None:
        if not self._is_foreseen(job) or job.distribution is None:
            return None
        foreseen = job.foreseen
        if not isinstance(foreseen, _Foreseen) or foreseen.revision != job.revision:
            if job.refined is None:
                foreseen = _by_prompt(job, job.distribution)
            else:
                lengths, weights = job.refined.lengths, job.refined.weights
                foreseen = _Foreseen(job.revision, lengths.tolist(), weights.cumsum().tolist())
            job.foreseen = foreseen
        return foreseen

    def _is_foreseen(self, job: Job) -> bool:
        return self.quantile > 0 and not job.has_fixed_length and job.is_ranked

    def asked_tokens(self, job: Job) -> int:
        """How many tokens admission asks for a waiting job, from its first one."""
        left = self.foreseen_tokens(job)
        return job.max_new_tokens if left is None else job.generated_tokens + left

    def left_tokens(self, job: Job, expected_share: float) -> float:
        """Of its answer, to come. expected_share: see SchedulerView; for a job of which nothing is
        known."""
        left = self.foreseen_tokens(job)
        if left is not None:
            return float(min(left, self.clip_tokens))
        cap_leaves = max(job.max_new_tokens - job.generated_tokens, 0)
        # SGLang: fixed-length requests cannot benefit from the early-EOS estimate.
        share = 1.0 if job.has_fixed_length else expected_share
        return float(min(cap_leaves, self.clip_tokens) * share)

    def needed_tokens(self, job: Job, page_size: int) -> int:
        """Of the KV pool, for a waiting job, but for a prefix that the radix tree may have."""
        filled = job.input_tokens + job.generated_tokens
        return filled + int(self.left_tokens(job, 1.0)) + page_size

    def set_aside_tokens(
        self, running: Sequence[Job], expected_share: float, page_size: int
    ) -> list[float]:
        """Of the KV pool, what to keep free for the rest of each running job's answer."""
        left = [self.left_tokens(job, expected_share) for job in running]
        if self.quantile <= 0:
            return left
        held = np.array([job.held_tokens for job in running], np.int64)
        shares: list[float] = shared_peak_tokens(held, np.array(left), page_size).tolist()
        return shares


@dataclass(slots=True)
class _Foreseen:
    """A length distribution as lists, and the length that it foretells at the age last asked for.
    In lists and not LengthDistribution.surviving, as every pass asks for all that run."""

    revision: int
    lengths: list[float]
    cumulative: list[float]
    age_tokens: int = -_INTERVAL_TOKENS
    factor: float = 1.0
    length_tokens: int = 0

    def look(self, age_tokens: int, quantile: float, factor: float, cap_tokens: int) -> None:
        """factor: how much longer than the distribution says all lengths are taken to be."""
        self.age_tokens, self.factor = age_tokens, factor
        length_tokens = self.quantile_tokens(age_tokens / factor, quantile)
        if length_tokens is None:
            # Longer than anything foreseen. To fear the cap would let a few bad forecasts close the
            # door to all.
            self.length_tokens = min(2 * age_tokens, cap_tokens)
        else:
            self.length_tokens = min(math.ceil(length_tokens * factor), cap_tokens)

    def quantile_tokens(self, age_tokens: float, quantile: float) -> float | None:
        """Of the lengths above an age; None if there are none."""
        first = bisect_right(self.lengths, age_tokens)
        if first == len(self.lengths):
            return None
        gone = self.cumulative[first - 1] if first else 0.0
        reached = gone + (self.cumulative[-1] - gone) * quantile
        place = bisect_left(self.cumulative, reached - 1e-9, lo=first)
        return self.lengths[min(place, len(self.lengths) - 1)]


def _by_prompt(job: Job, distribution: LengthDistribution) -> _Foreseen:
    known = distribution.with_tail(job.max_new_tokens)
    lengths, cumulative = known.lengths.tolist(), np.cumsum(known.weights).tolist()
    return _Foreseen(job.revision, lengths, cumulative)


def shared_peak_tokens(
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
