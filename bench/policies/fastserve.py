"""Implements FastServe, a multi-level feedback queue without predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from sage_sched.fields import MOST
from sage_sched.job import Job
from sage_sched.plan import NextPlan
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class FastServeParameters:
    """Settings of fastserve."""

    quantum_ms: Annotated[float, Meta(ge=1e-3, le=MOST)] = 100.0
    """The quantum of the best level."""
    refresh_interval_tokens: Annotated[int, Meta(ge=1, le=MOST)] = 200
    """Tokens between two decisions on preemption while the batch is full."""
    max_preemptions: Annotated[int, Meta(ge=1, le=MOST)] = 4
    """A request is preempted at most this often."""


class FastServe(Policy):
    """Skip-join MLFQ (Wu et al. 2023, section 4.1).

    A request joins the level whose quantum covers its first iteration, the prefill. It is demoted a
    level each time that it has used up its level's quantum. Each level has twice the quantum of the
    level above. Within a level the order is by arrival. A request of a better level preempts a
    running one. Time is this server's step time at full slots, so a token has the same price on
    every rank.
    """

    Parameters = FastServeParameters

    def __init__(self, parameters: FastServeParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        most = parameters.max_preemptions
        self.traits = replace(type(self).traits, max_preemptions=most)

    def rank(self, job: Job) -> None:
        prefill_s = self.server.recompute_s(job.input_tokens, job.cached_input_tokens)
        quanta = prefill_s * 1e3 / self.parameters.quantum_ms
        job.memo = max(0, math.ceil(math.log2(quanta))) if quanta > 0 else 0

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        return NextPlan(interval_tokens=self.parameters.refresh_interval_tokens)

    def key(self, job: Job, view: SchedulerView) -> float:
        assert isinstance(job.memo, int)
        slots, pool = self.server.max_running_requests, self.server.kv_pool_tokens
        decoded_s = job.generated_tokens * self.server.step_time.decode_s(slots, pool)
        # The quanta of levels joined to n - 1 add up to (2^n - 2^joined) quanta of level 0.
        quanta = decoded_s * 1e3 / self.parameters.quantum_ms
        return float(math.floor(math.log2(2.0**job.memo + quanta) + 1e-9))

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return self.key(waiting, view) < self.key(running, view)
