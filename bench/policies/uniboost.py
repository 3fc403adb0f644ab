"""Implements UniBoost: first come, first served, with a boost for small requests and no
prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sage_sched.fields import Pools
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView


@dataclass(frozen=True, slots=True)
class UniBoostParameters:
    """Settings of uniboost."""

    boost_pools: Pools = 1.0
    """1/g, in KV pools of tokens."""


class UniBoost(Policy):
    """`key = arrival - (1/g) ln(1 / (1 - exp(-g w)))` (UniBoost, ICML 2026; the boost is that of Yu
    and Scully 2024, which minimizes the tail's decay in an M/G/1 queue).

    arrival: in served tokens, the clock that all ranks share.
    w: the part of the work that is known: the uncached tokens of the prompt.
    1/g: boost_pools KV pools of tokens.
    """

    Parameters = UniBoostParameters

    def rank(self, job: Job) -> None:
        window = self.parameters.boost_pools * self.server.kv_pool_tokens
        work_tokens = max(1, job.input_tokens - job.cached_input_tokens)
        boost = -window * math.log(-math.expm1(-work_tokens / window))
        job.memo = job.served_at_arrival_tokens - boost

    def key(self, job: Job, view: SchedulerView) -> float:
        assert isinstance(job.memo, float)
        return job.memo
