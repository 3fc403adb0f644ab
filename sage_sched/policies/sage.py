"""SageSched: the smallest Gittins index of the predicted cost first, with aging."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sage_sched.config import PolicyConfig
from sage_sched.cost import cost_named
from sage_sched.gittins import GittinsTable
from sage_sched.job import Job
from sage_sched.policy import Policy, register


@dataclass(slots=True)
class _Memo:
    """A job's table, and its key at the age at which it was last asked for."""

    table: GittinsTable
    age_tokens: int = -1
    key: float = 0.0


@register("sage")
class SagePolicy(Policy):
    """Gittins order (SageSched, section 3.3), divided by e to the work served while waiting.

    With G the index, a and now the tokens that the server had served at the job's arrival and
    has served by now, and w the aging window, the job's index counts as `G * exp(-(now - a) / w)`.
    In logarithms `now` is the same for all, so the key is `ln G + a / w`: constant while a job
    waits, and the wait is bounded, since no G is more than exp((now - a) / w) times another
    for ever: a job is overtaken by none that arrives after `w * ln(its G / smallest G)` tokens.
    """

    def __init__(self, config: PolicyConfig, *, kv_pool_tokens: int) -> None:
        self._cost = cost_named(config.cost)
        self._bucket_tokens = config.bucket_tokens
        self._aging_tokens = config.aging_pools * kv_pool_tokens

    def admit(self, job: Job) -> bool:
        if job.distribution is None:
            return False
        job.memo = _Memo(
            GittinsTable(
                job.distribution,
                self._cost,
                input_tokens=job.input_tokens,
                max_tokens=job.max_new_tokens,
                bucket_tokens=self._bucket_tokens,
            )
        )
        return True

    def key(self, job: Job) -> float:
        memo = job.memo
        assert isinstance(memo, _Memo)
        if memo.age_tokens != job.generated_tokens:
            memo.age_tokens = job.generated_tokens
            index = memo.table.index(job.generated_tokens)
            memo.key = math.log(index) + job.served_at_arrival_tokens / self._aging_tokens
        return memo.key
