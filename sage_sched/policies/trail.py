"""TRAIL: the shortest predicted remaining length first, with limited preemption."""

from __future__ import annotations

from dataclasses import dataclass

from sage_sched.config import PolicyConfig
from sage_sched.cost import cost_named
from sage_sched.job import Job
from sage_sched.mean_cost import MeanCost
from sage_sched.policy import Policy, register
from sage_sched.step_time import ServerFacts


@dataclass(slots=True)
class _Memo:
    remaining: MeanCost
    first_prediction_tokens: float


@register("trail")
class TrailPolicy(Policy):
    """TRAIL (section 3.3): by the predicted remaining length; a running request may yield while
    its age is less than trail_limit times its first prediction.

    The paper predicts the remaining length anew after each token from hidden states. Here it is
    the mean of the prompt's distribution given the age: what the same knowledge of the prompt says.
    """

    def __init__(self, config: PolicyConfig, server: ServerFacts) -> None:
        super().__init__(config, server)
        self._tokens = cost_named("output", server)

    def admit(self, job: Job) -> bool:
        if job.distribution is None:
            return False
        remaining = MeanCost(
            job.distribution,
            self._tokens,
            input_tokens=job.input_tokens,
            max_tokens=job.max_new_tokens,
            bucket_tokens=self.config.bucket_tokens,
        )
        job.memo = _Memo(remaining, remaining.index(0))
        return True

    def key(self, job: Job, served_tokens: int) -> float:
        assert isinstance(job.memo, _Memo)
        return job.memo.remaining.index(job.generated_tokens)

    def yields(self, running: Job, waiting: Job, served_tokens: int, move_s: float) -> bool:
        assert isinstance(running.memo, _Memo)
        limit = self.config.trail_limit * running.memo.first_prediction_tokens
        ahead = self.key(waiting, served_tokens) < self.key(running, served_tokens)
        return ahead and running.generated_tokens < limit
