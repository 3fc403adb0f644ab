"""TRAIL: the shortest predicted remaining length first, limited preemption."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from bench.policies.trail_filter import TrailFilter
from sage_sched.fields import MOST, require_within
from sage_sched.index import REFRESH_INTERVAL_TOKENS, MeanCost
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.probe import Edges
from sage_sched.steps import num_steps
from sage_sched.view import SchedulerView


@dataclass(frozen=True, slots=True)
class TrailPromptParameters:
    """limit: a request no longer yields past this share of its first prediction (the paper's c)."""

    section: ClassVar[str] = "trail-prompt"
    limit: float = 0.8

    def __post_init__(self) -> None:
        require_within(f"policy.{self.section}.limit", self.limit, 1e-9, MOST)


class TrailParameters(TrailPromptParameters):
    section = "trail"


@dataclass(slots=True)
class _Memo:
    """left_tokens: what is predicted to be left of the answer, by its age in tokens. limit_tokens:
    the age from which on it no longer yields."""

    left_tokens: Callable[[int], float]
    limit_tokens: float


def _memo(job: Job) -> _Memo:
    assert isinstance(job.memo, _Memo)
    return job.memo


class TrailPrompt(Policy):
    """TRAIL (Shahout et al., ICLR 2025, section 3.3) as far as the prompt tells: by the predicted
    remaining length; a running request may yield while its age is less than limit times its first
    prediction.

    The remaining length is the mean of the prompt's distribution given the age (the paper's
    TRAIL-BERT).
    """

    Parameters = TrailPromptParameters

    def on_arrival(self, job: Job) -> bool:
        """Compute its remaining length at all ages."""
        if job.distribution is None:
            return False
        left_tokens = _by_prompt(job)
        job.memo = _Memo(left_tokens, self.parameters.limit * left_tokens(0))
        return True

    def on_forecast(self, job: Job) -> None:
        """The remaining length anew. What it was first predicted to be stays."""
        _memo(job).left_tokens = _by_prompt(job)

    def key(self, job: Job, view: SchedulerView) -> float:
        """The predicted remaining length."""
        return _memo(job).left_tokens(job.generated_tokens)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """If less is left of the waiting job, and the running one is young enough."""
        ahead = self.key(waiting, view) < self.key(running, view)
        return ahead and running.generated_tokens < _memo(running).limit_tokens


def _by_prompt(job: Job) -> Callable[[int], float]:
    assert job.distribution is not None
    return MeanCost(
        job.distribution,
        num_steps,
        input_tokens=job.input_tokens,
        max_tokens=job.max_new_tokens,
        interval_tokens=REFRESH_INTERVAL_TOKENS,
    ).index


class Trail(TrailPrompt):
    """TRAIL with hidden states: a running request may yield during its first floor(limit * first
    prediction) tokens.

    The prompt's forecast orders those that have not begun. From the prefill on the remaining length
    is predicted anew at each token (bench.policies.trail_filter).
    """

    Parameters = TrailParameters
    refresh_interval_tokens = 1

    def refiner(self, edges: Edges) -> TrailFilter:
        """The filter, over bins of the width of the first."""
        return TrailFilter(float(edges[1]))

    def on_arrival(self, job: Job) -> bool:
        """Its predicted length."""
        if job.distribution is None:
            return False
        first_tokens = job.mean_tokens()
        job.memo = _Memo(lambda age: first_tokens, self._limit_tokens(first_tokens))
        return True

    def on_forecast(self, job: Job) -> None:
        """What is left of it, by now. The limit is that of the first prediction by a hidden state,
        the middle of its likeliest bin."""
        refined = job.refined
        if refined is None:
            return
        if job.revision == 1:
            first = refined.lengths[refined.weights.argmax()] - refined.age_tokens
            _memo(job).limit_tokens = self._limit_tokens(float(first))
        left_tokens = float(refined.lengths @ refined.weights) - refined.age_tokens
        _memo(job).left_tokens = lambda age: left_tokens

    def _limit_tokens(self, first_tokens: float) -> float:
        limit: float = self.parameters.limit
        return math.floor(limit * first_tokens)
