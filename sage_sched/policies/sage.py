"""Serves the job with the smallest Gittins index first (SageSched), with a TTFT target and a
starvation bound."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from sage_sched.index import Indices
from sage_sched.job import Job
from sage_sched.plan import NextPlan
from sage_sched.policy import Policy, Traits
from sage_sched.session_returns import SessionReturns
from sage_sched.starts import Starts
from sage_sched.starvation_bound import StarvationBound
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView


@dataclass(frozen=True, slots=True)
class SageParameters:
    """Settings of `sage`."""

    ttft_ms: Annotated[float, Meta(ge=0)] = 2000.0
    """TTFT target. New requests wait up to it, or to their own deadline, so that they are prefilled
    together. If memory is full, running requests with a larger Gittins index are swapped out.
    `inf`: no target."""
    regret: Annotated[float, Meta(ge=0)] = 32.0
    """Starvation bound: after a request arrives, the work for later requests may reach `regret`
    times the work for earlier ones plus a batch. Then no request overtakes it. `inf`: no bound."""


class Sage(Policy):
    """Serves the job with the smallest Gittins index of the predicted cost first (SageSched,
    section 3.3).

    The index of a new request uses its whole length distribution. Once it has generated tokens, the
    index uses only lengths above their number.

    New requests start together, in time for a TTFT target (sage_sched.starts). Until its start is
    due, a new request is ordered behind all others. Then its key is the logarithm of its index or
    of the price of its start, whichever is smaller, and running requests with a larger index are
    preempted for it. Other requests preempt only if they have passed the starvation bound or the
    swap-out bound. A running request with a TPOT target is not preempted for a start.
    """

    Parameters = SageParameters
    traits = Traits(
        predicts_waits=True,
        retention=SessionReturns,
        preempts_for_starts=True,
        # No limit is needed, because a request preempts others only while its start is due or if it
        # has passed a bound. With a limit, long requests that reached it would fill the memory.
        max_preemptions=sys.maxsize,
    )

    def __init__(self, parameters: SageParameters, server: ServerFacts) -> None:
        self._indices = Indices(server)
        super().__init__(parameters, server, self._indices)
        starts = parameters.ttft_ms < math.inf
        self.traits = replace(type(self).traits, uses_clock=starts, starts_early=starts)
        self._starts = Starts(parameters.ttft_ms / 1e3, self._indices)
        self._starvation = StarvationBound(parameters.regret)

    def takes_over(self, before: Policy) -> None:
        if isinstance(before, Sage) and before.parameters.regret == self.parameters.regret:
            self._starvation = before._starvation

    def on_arrival(self, job: Job) -> bool:
        self._starvation.arrived(job)
        return self._indices.rank(job)

    def on_end(self, job: Job, now_s: float) -> None:
        self._starvation.ended(job)

    def on_queued(self, job: Job) -> None:
        self._starvation.served(job)
        self._starts.queued(job)

    def on_dequeued(self, job: Job) -> None:
        self._starts.dequeued(job)

    def on_pass(self, view: SchedulerView) -> NextPlan:
        self._starvation.check(view)
        self._starts.update(view)
        return NextPlan(self._starts.next_s, self._starvation.next_tokens)

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._starts.key(job, self._indices.of(job).log_index)

    def starts_now(self, job: Job) -> bool:
        return self._starts.starts_now(job)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        if running.hints.tpot_slo_ms is not None or not self.starts_now(waiting):
            return False
        return math.exp(self.key(waiting, view)) + price_s < self._indices.of(running).index
