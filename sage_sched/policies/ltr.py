"""LTR: by the rank of the predicted length, with a guard against starvation."""

from __future__ import annotations

from typing import ClassVar

from sage_sched.job import Job
from sage_sched.policy import Policy, register

# Ahead of every length, and among themselves by arrival.
_STARVED = -1.0


@register("ltr")
class LtrPolicy(Policy):
    """Learning to rank (Fu et al. 2024, section 3.3): shorter before longer, of which nothing but
    the rank matters, so any increasing score is the same policy; here the predicted mean length.

    A request that has waited for starvation_pools KV pools of served tokens goes ahead of all
    others and stays there. The paper counts scheduling steps instead, which are of no fixed size.
    """

    moves: ClassVar[bool] = True

    def admit(self, job: Job) -> bool:
        if job.distribution is None:
            return False
        job.memo = job.distribution.capped(job.max_new_tokens).mean()
        return True

    def key(self, job: Job, served_tokens: int) -> float:
        assert isinstance(job.memo, float)
        waited_pools = (served_tokens - job.served_at_arrival_tokens) / self.server.kv_pool_tokens
        starved = job.generated_tokens == 0 and waited_pools > self.config.starvation_pools
        return _STARVED if starved else job.memo
