"""TRAIL: the shortest remaining length first as hidden states predict it, limited preemption."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.policies.trail_filter import TrailFilter
from sage_sched.fields import MOST, require_within
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.probe import Reading
from sage_sched.view import SchedulerView


@dataclass(frozen=True, slots=True)
class TrailParameters:
    """Settings of trail.

    limit: a request no longer yields past this share of its first prediction (the paper's c).
    """

    limit: float = 0.8

    def __post_init__(self) -> None:
        require_within("policy.trail.limit", self.limit, 1e-9, MOST)


@dataclass(slots=True)
class _Memo:
    """By the prompt: the predicted length. From then on what is left by the hidden states; how long
    it may yield."""

    left_tokens: float
    limit_tokens: int


class Trail(Policy):
    """TRAIL (Shahout et al., ICLR 2025, section 3.3): by the predicted remaining length; a running
    request may yield during its first floor(limit * first prediction) tokens.

    The prompt's forecast orders those that have not begun (the paper's BERT). From the prefill on
    the remaining length is predicted anew at each token (bench.policies.trail_filter).
    """

    Parameters = TrailParameters
    refines_by = "trail"
    refresh_interval_tokens = 1

    def refiner(self, reading: Reading) -> TrailFilter:
        """The filter, over bins of the width of the reading's."""
        return TrailFilter(float(reading.edges[1]))

    def on_arrival(self, job: Job) -> bool:
        """Its predicted length."""
        if job.distribution is None:
            return False
        first_tokens = job.mean_tokens()
        job.memo = _Memo(first_tokens, self._limit_tokens(first_tokens))
        return True

    def on_forecast(self, job: Job) -> None:
        """What is left of it, by now. The limit is that of the first prediction by a hidden state,
        the middle of its likeliest bin."""
        refined = job.refined
        assert isinstance(job.memo, _Memo)
        if refined is None:
            return
        if job.revision == 1:
            first = refined.lengths[refined.weights.argmax()] - refined.age_tokens
            job.memo.limit_tokens = self._limit_tokens(float(first))
        mean_tokens = float(refined.lengths @ refined.weights)
        job.memo.left_tokens = mean_tokens - refined.age_tokens

    def _limit_tokens(self, first_tokens: float) -> int:
        limit: float = self.parameters.limit
        return math.floor(limit * first_tokens)

    def key(self, job: Job, view: SchedulerView) -> float:
        """The predicted remaining length."""
        assert isinstance(job.memo, _Memo)
        return job.memo.left_tokens

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """If less is left of the waiting job, and the running one is young enough."""
        assert isinstance(running.memo, _Memo)
        ahead = self.key(waiting, view) < self.key(running, view)
        return ahead and running.generated_tokens < running.memo.limit_tokens
