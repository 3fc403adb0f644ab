"""LTR: serves the request with the probably shortest answer first, with a starvation bound."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from bench.policies.ssjf import Ssjf
from sage_sched.job import Job
from sage_sched.plan import NextPlan
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue

# Ahead of every length. Starved requests keep their order of arrival.
_STARVED = -1.0


@dataclass(frozen=True, slots=True)
class LtrParameters:
    """Settings of ltr."""

    starvation_pools: Annotated[float, Meta(ge=1e-6)] = 10.0
    """A request goes first once the server has served this many KV pools of tokens while it
    waited."""


class Ltr(Ssjf):
    """Learning to rank (Fu et al. 2024, section 3.3), by the predicted median length.

    The paper's model learns which of two answers is longer, not how long they are. So the length of
    a rare long answer does not matter; in SSJF's mean it does.

    A request that has waited for starvation_pools KV pools of served tokens goes ahead of all
    others until its first token. The paper counts scheduling steps instead, which have no fixed
    size.
    """

    Parameters = LtrParameters

    def __init__(self, parameters: LtrParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self._most_tokens = parameters.starvation_pools * server.kv_pool_tokens
        # Waiting jobs below the starvation bound, by arrival.
        self._patient: list[Job] = []

    def rank(self, job: Job) -> None:
        job.memo = float(job.distribution.capped(job.max_new_tokens).quantile(0.5))

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        for job in queue.came if self._most_tokens < math.inf else ():
            insort(self._patient, job, key=lambda job: job.arrival)
        while self._patient and self._starves(self._patient[0], view):
            self._patient.pop(0).changes()
        return NextPlan()

    def _starves(self, job: Job, view: SchedulerView) -> bool:
        return view.served_tokens - job.served_at_arrival_tokens > self._most_tokens

    def key(self, job: Job, view: SchedulerView) -> float:
        starved = job.generated_tokens == 0 and self._starves(job, view)
        return _STARVED if starved else super().key(job, view)
