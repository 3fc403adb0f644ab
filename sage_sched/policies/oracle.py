"""SRPT by true remaining cost: what no server can do, as a reference."""

from __future__ import annotations

from typing import ClassVar

from sage_sched.config import PolicyConfig
from sage_sched.cost import cost_named
from sage_sched.job import Job
from sage_sched.policy import Policy, register
from sage_sched.step_time import ServerFacts


@register("srpt-oracle")
class SrptOraclePolicy(Policy):
    """Least remaining measured cost first, by the one length of a distribution that is the truth.

    Only a simulator hands out such distributions.
    """

    clairvoyant: ClassVar[bool] = True

    def __init__(self, config: PolicyConfig, server: ServerFacts) -> None:
        super().__init__(config, server)
        self._cost = cost_named("measured", server)

    def admit(self, job: Job) -> bool:
        if job.distribution is None or job.distribution.source != "truth":
            raise ValueError("srpt-oracle needs true lengths, which no server has")
        job.memo = self._cost(job.input_tokens, int(job.distribution.lengths[0]))
        return True

    def key(self, job: Job, served_tokens: int) -> float:
        assert isinstance(job.memo, float)
        spent = self._cost(job.input_tokens, job.generated_tokens) if job.generated_tokens else 0.0
        return job.memo - spent

    def yields(self, running: Job, waiting: Job, served_tokens: int, move_s: float) -> bool:
        margin = 1.0 + self.config.preempt_margin
        price = self.key(waiting, served_tokens) + move_s
        return margin * price < self.key(running, served_tokens)
