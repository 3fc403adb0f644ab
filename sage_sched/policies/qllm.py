"""QLLM: latency-sensitive requests before best-effort ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sage_sched.fields import require
from sage_sched.job import Job
from sage_sched.policies.sage import Sage
from sage_sched.policies.urgency import Urgency, UrgencyParameters
from sage_sched.step_time import ServerFacts
from sage_sched.view import SchedulerView

# Requests as urgent as this, or more, are latency-sensitive.
_SENSITIVE = 2


@dataclass(frozen=True, slots=True)
class QllmParameters:
    """Settings of qllm. A pool is as many tokens as the KV pool holds.

    level_pools, decode_share, preempts: as of urgency.
    """

    level_pools: float = 1.0
    decode_share: float = 0.1
    preempts: bool = True

    def __post_init__(self) -> None:
        pools, share = self.level_pools, self.decode_share
        require(0 < pools < math.inf, "policy.qllm.level_pools", pools, "above 0, finite")
        require(0 <= share <= 1, "policy.qllm.decode_share", share, "0 to 1")


class Qllm(Urgency):
    """Two classes, after "Priority-Aware Preemptive Scheduling for Mixed-Priority Workloads in MoE
    Inference" (Siavashi et al., EuroMLSys 2025): latency-sensitive (LS), of urgency 2 or better,
    and best effort (BE); LS before BE, each by arrival.

    It is urgency with two levels and without credit. As nothing is ordered within a piece of work,
    none is rounded to: with a the work done when a job came, and P = level_pools KV pools, the key
    is a for LS and a + P for BE.

    Theorem: no BE job is behind one that came when the server had done more than P of work since.

    Proof: let k be behind which j of BE is: a_k <= key of k <= key of j = a_j + P. QED.

    Not as in the paper: there BE waits for ever if LS keeps coming, and its Algorithm 1 fills the
    prefills of LS with those of BE, for whose end LS then waits, and lets nobody of BE begin while
    anybody decodes. Here decode steps have decode_share of the time while LS decodes and BE is
    prefilled.
    """

    Parameters = QllmParameters  # type: ignore[assignment]
    variants = {}  # noqa: RUF012

    def __init__(self, parameters: QllmParameters, server: ServerFacts) -> None:
        as_urgency = UrgencyParameters(
            level_pools=parameters.level_pools,
            share=0.0,
            decode_share=parameters.decode_share,
            by_length=False,
            preempts=parameters.preempts,
        )
        super().__init__(as_urgency, server)

    def on_arrival(self, job: Job) -> bool:
        """As sage, for whom it is; nobody claims credit."""
        return Sage.on_arrival(self, job)

    def key(self, job: Job, view: SchedulerView) -> float:
        """The work that was done when it came, and for BE what it may be overtaken by."""
        return job.served_at_arrival_tokens + (self.level(job) - _SENSITIVE) * self._piece_tokens

    def level(self, job: Job) -> int:
        """Of urgency's: 2 for LS, 3 for BE."""
        return _SENSITIVE if job.hints.urgency <= _SENSITIVE else _SENSITIVE + 1
