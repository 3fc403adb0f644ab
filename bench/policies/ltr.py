"""LTR: by the rank of the predicted length, with a guard against starvation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bench.policies.ssjf import Ssjf
from sage_sched.fields import LEAST_POOLS, MOST, require_within
from sage_sched.job import Job
from sage_sched.view import SchedulerView

# Ahead of every length, and among themselves by arrival.
_STARVED = -1.0


@dataclass(frozen=True, slots=True)
class LtrParameters:
    """starvation_pools: a request that has waited for so many KV pools of tokens goes first."""

    starvation_pools: float = 10.0

    def __post_init__(self) -> None:
        pools = self.starvation_pools
        require_within("policy.ltr.starvation_pools", pools, LEAST_POOLS, MOST, or_inf=True)


class Ltr(Ssjf):
    """Learning to rank (Fu et al. 2024, section 3.3): shorter before longer, of which nothing but
    the rank matters, so any increasing score is the same policy; here the predicted mean length.

    A request that has waited for starvation_pools KV pools of served tokens goes ahead of all
    others and stays there. The paper counts scheduling steps instead, which are of no fixed size.
    """

    Parameters = LtrParameters
    moves: ClassVar[bool] = True

    def key(self, job: Job, view: SchedulerView) -> float:
        """The predicted mean length, unless it starves."""
        waited_tokens = view.served_tokens - job.served_at_arrival_tokens
        waited_pools = waited_tokens / self.server.kv_pool_tokens
        starved = job.generated_tokens == 0 and waited_pools > self.parameters.starvation_pools
        return _STARVED if starved else super().key(job, view)
