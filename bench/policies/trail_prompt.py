"""TRAIL by the prompt alone: the shortest predicted remaining length first, limited preemption."""

from __future__ import annotations

from dataclasses import dataclass

from sage_sched.cost import num_steps
from sage_sched.fields import MOST, require_within
from sage_sched.index import REFRESH_INTERVAL_TOKENS, MeanCost
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView


@dataclass(frozen=True, slots=True)
class TrailPromptParameters:
    """limit: a request no longer yields past this share of its first prediction (the paper's c)."""

    limit: float = 0.8

    def __post_init__(self) -> None:
        require_within("policy.trail-prompt.limit", self.limit, 1e-9, MOST)


@dataclass(slots=True)
class _Memo:
    remaining: MeanCost
    first_prediction_tokens: float


class TrailPrompt(Policy):
    """TRAIL (section 3.3) as far as the prompt tells: by the predicted remaining length; a running
    request may yield while its age is less than limit times its first prediction.

    The remaining length is the mean of the prompt's distribution given the age (the paper's
    TRAIL-BERT). bench.policies.trail predicts it anew after each token from hidden states.
    """

    Parameters = TrailPromptParameters

    def on_arrival(self, job: Job) -> bool:
        """Compute its remaining length at all ages."""
        if job.distribution is None:
            return False
        remaining = self._remaining(job)
        job.memo = _Memo(remaining, remaining.index(0))
        return True

    def on_forecast(self, job: Job) -> None:
        """The remaining length anew. What it was first predicted to be stays."""
        assert isinstance(job.memo, _Memo)
        job.memo.remaining = self._remaining(job)

    def _remaining(self, job: Job) -> MeanCost:
        assert job.distribution is not None
        return MeanCost(
            job.distribution,
            num_steps,
            input_tokens=job.input_tokens,
            max_tokens=job.max_new_tokens,
            interval_tokens=REFRESH_INTERVAL_TOKENS,
        )

    def key(self, job: Job, view: SchedulerView) -> float:
        """The predicted remaining length."""
        assert isinstance(job.memo, _Memo)
        return job.memo.remaining.index(job.generated_tokens)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """If less is left of the waiting job, and the running one is young enough."""
        assert isinstance(running.memo, _Memo)
        limit_tokens = self.parameters.limit * running.memo.first_prediction_tokens
        ahead = self.key(waiting, view) < self.key(running, view)
        return bool(ahead and running.generated_tokens < limit_tokens)
