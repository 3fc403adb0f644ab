"""Implements SageSched as published, without the bounds and costs of `sage`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from sage_sched.fields import MOST
from sage_sched.headroom import Headroom
from sage_sched.index import IndexTable, Indices, MeanCost
from sage_sched.job import Job
from sage_sched.plan import NextPlan
from sage_sched.policy import Policy, Traits
from sage_sched.session_returns import SessionReturns
from sage_sched.steps import Cost, ServerFacts, num_steps, seconds_on
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue


def resource_bound_cost(server: ServerFacts) -> Cost:
    """Return the cost in KV tokens held, summed over decode steps. Attention work grows in the same
    way (section 3.2)."""
    return lambda input_tokens, output_tokens, cached_tokens=0: (
        output_tokens * output_tokens / 2 + input_tokens * output_tokens
    )


def output_cost(server: ServerFacts) -> Cost:
    """Return the cost in decode steps (Fig. 10)."""
    return num_steps


def overall_cost(server: ServerFacts) -> Cost:
    """Return the cost in tokens, where an output token counts as two input tokens (Fig. 10)."""
    return lambda input_tokens, output_tokens, cached_tokens=0: (
        input_tokens - cached_tokens + 2.0 * output_tokens
    )


COSTS = {
    "resource-bound": resource_bound_cost,
    "output": output_cost,
    "overall": overall_cost,
    "seconds": seconds_on,
}
INDICES: dict[str, type[IndexTable]] = {"gittins": IndexTable, "mean": MeanCost}


@dataclass(frozen=True, slots=True)
class SageSchedParameters:
    """Settings of sagesched. The predictor is a setting of its own, [predictor]."""

    cost: Literal["resource-bound", "output", "overall", "seconds"] = "resource-bound"
    """`resource-bound` is the paper's cost (section 3.2). Fig. 10 compares it with `output` and
    `overall`. `seconds` is the cost of `sage`."""
    index: Literal["gittins", "mean"] = "gittins"
    """`mean` is the expected remaining cost, which Fig. 11 compares."""
    bucket_tokens: Annotated[int, Meta(ge=1, le=MOST)] = 200
    """The tokens after which a running request's index is computed anew (section 4.1)."""
    headroom: Literal["none", "priced"] = "none"
    """`none`, as in vLLM, where a prompt enters if it fits; `priced`, as under `sage`."""


class SageSched(Policy):
    """Serves the smallest Gittins index of the predicted cost first, and preempts for a smaller one
    (SageSched, section 3.3).

    There is no bound on waits, and moving KV counts as free.
    """

    Parameters = SageSchedParameters
    traits = Traits(predicts_waits=True, max_preemptions=sys.maxsize)

    def __init__(self, parameters: SageSchedParameters, server: ServerFacts) -> None:
        self._indices = _indices(parameters, server)
        headroom = Headroom.of if parameters.headroom == "priced" else _little_headroom
        self.traits = replace(type(self).traits, headroom=headroom)
        super().__init__(parameters, server, self._indices)

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        return NextPlan(interval_tokens=self.parameters.bucket_tokens)

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._indices.of(job).log_index

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return self.key(waiting, view) < self.key(running, view)


def _little_headroom(view: SchedulerView, sessions: SessionReturns | None) -> Headroom:
    reserve_tokens = view.server.reserve_tokens
    return Headroom(reserve_tokens, view.page_size, view.server.kv_pool_tokens, reserve_tokens)


def _indices(parameters: SageSchedParameters, server: ServerFacts) -> Indices:
    class Chosen(Indices):
        cost_on = staticmethod(COSTS[parameters.cost])
        table_type = INDICES[parameters.index]
        interval_tokens = parameters.bucket_tokens

    return Chosen(server)
