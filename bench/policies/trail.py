"""TRAIL: serves the shortest predicted remaining length first, with limited preemption."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from bench.policies.trail_filter import TrailFilter
from sage_sched.fields import MOST
from sage_sched.job import Job
from sage_sched.plan import NextPlan
from sage_sched.policy import Policy, Traits
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue

# Stands for the paper's rank of minus infinity: it is below any remaining length. Requests with
# this key keep the order of arrival.
_FIRST = -1.0


@dataclass(frozen=True, slots=True)
class TrailParameters:
    """Settings of trail and trail-prompt."""

    limit: Annotated[float, Meta(ge=1e-9, le=MOST)] = 0.8
    """A request is not preempted past this share of its first prediction (the paper's c)."""


@dataclass(slots=True)
class _Memo:
    """A job's prediction.

    end_tokens: the predicted length of the answer.
    limit_tokens: the age in tokens from which the job is no longer preempted.
    """

    end_tokens: float
    limit_tokens: float


def _memo(job: Job) -> _Memo:
    assert isinstance(job.memo, _Memo)
    return job.memo


class TrailPrompt(Policy):
    """TRAIL from the prompt alone (Shahout et al., ICLR 2025, section 4.2: TRAIL-BERT).

    A request's rank is its first prediction minus its age. Once its age reaches limit times its
    first prediction, it goes before all others and is never preempted (appendix C: a rank of minus
    infinity).
    """

    Parameters = TrailParameters

    def rank(self, job: Job) -> None:
        if job.memo is not None:
            return
        first_tokens = job.mean_tokens()
        job.memo = _Memo(first_tokens, self._limit_tokens(first_tokens))

    def key(self, job: Job, view: SchedulerView) -> float:
        memo, age = _memo(job), job.generated_tokens
        if age and age >= memo.limit_tokens:
            return _FIRST
        return max(0.0, memo.end_tokens - age)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return self.key(waiting, view) < self.key(running, view)

    def _limit_tokens(self, first_tokens: float) -> float:
        limit: float = self.parameters.limit
        return math.floor(limit * first_tokens)


class Trail(TrailPrompt):
    """TRAIL with hidden states.

    The prompt's prediction orders requests that have not begun. After the prefill, each token
    brings a new prediction of the remaining length (bench.policies.trail_filter).
    """

    # The bins all have the width of the first one.
    traits = Traits(refiner=lambda edges: TrailFilter(float(edges[1])))

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        return NextPlan(interval_tokens=1)

    def rank(self, job: Job) -> None:
        """Update the job's predicted length. The first prediction from a hidden state also sets the
        limit, from the middle of its likeliest bin."""
        super().rank(job)
        refined = job.refined
        if refined is None:
            return
        if job.revision == 1:
            first = refined.lengths[refined.weights.argmax()] - refined.age_tokens
            _memo(job).limit_tokens = self._limit_tokens(float(first))
        _memo(job).end_tokens = float(refined.lengths @ refined.weights)
