"""UniBoost: first come, first served, less a boost that small requests get; no prediction."""

from __future__ import annotations

import math

from sage_sched.job import Job
from sage_sched.policy import Policy, register


@register("uniboost")
class UniBoostPolicy(Policy):
    """`key = arrival - (1/g) ln(1 / (1 - exp(-g w)))` (UniBoost, ICML 2026; the boost is that of
    Yu and Scully 2024, which minimizes the tail's decay in an M/G/1 queue).

    arrival is in tokens that the server has served, the clock that all ranks share; w is what is
    known of the work, the prompt's tokens; 1/g is boost_pools KV pools of tokens.
    """

    def admit(self, job: Job) -> bool:
        window = self.config.boost_pools * self.server.kv_pool_tokens
        boost = -window * math.log(-math.expm1(-max(1, job.input_tokens) / window))
        job.memo = job.served_at_arrival_tokens - boost
        return True

    def key(self, job: Job, served_tokens: int) -> float:
        assert isinstance(job.memo, float)
        return job.memo
