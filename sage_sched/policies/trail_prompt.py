"""TRAIL by the prompt alone: the shortest predicted remaining length first, limited preemption."""

from __future__ import annotations

from dataclasses import dataclass

from sage_sched.cost import cost_named
from sage_sched.fields import MOST, require_within
from sage_sched.index.mean_cost import MeanCost
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.steps.time import ServerFacts
from sage_sched.view import SchedulerView


@dataclass(frozen=True, slots=True)
class TrailPromptParameters:
    """Settings of trail-prompt.

    limit: a request no longer yields past this share of its first prediction (the paper's c).
    refresh_interval_tokens: the remaining length is predicted anew every so many tokens.
    """

    limit: float = 0.8
    refresh_interval_tokens: int = 200

    def __post_init__(self) -> None:
        require_within("policy.trail-prompt.limit", self.limit, 1e-9, MOST)
        interval = self.refresh_interval_tokens
        require_within("policy.trail-prompt.refresh_interval_tokens", interval, 1, MOST)


@dataclass(slots=True)
class _Memo:
    remaining: MeanCost
    first_prediction_tokens: float


class TrailPrompt(Policy):
    """TRAIL (section 3.3) as far as the prompt tells: by the predicted remaining length; a running
    request may yield while its age is less than limit times its first prediction.

    The remaining length is the mean of the prompt's distribution given the age (the paper's
    TRAIL-BERT). sage_sched.probe.policy predicts it anew after each token from hidden states.
    """

    Parameters = TrailPromptParameters

    def __init__(self, parameters: TrailPromptParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self.refresh_interval_tokens = parameters.refresh_interval_tokens
        self._tokens = cost_named("output", server)

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
            self._tokens,
            input_tokens=job.input_tokens,
            max_tokens=job.max_new_tokens,
            interval_tokens=self.refresh_interval_tokens,
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
