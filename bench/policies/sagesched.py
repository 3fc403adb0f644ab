"""SageSched as published, without the bounds and prices of `sage`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.policies.variants import output_cost, overall_cost, resource_bound_cost
from sage_sched.fields import MOST, require, require_within
from sage_sched.index import IndexTable, Indices, MeanCost
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts, seconds_on
from sage_sched.view import SchedulerView

COSTS = {
    "resource-bound": resource_bound_cost,
    "output": output_cost,
    "overall": overall_cost,
    "seconds": seconds_on,
}
INDICES: dict[str, type[IndexTable]] = {"gittins": IndexTable, "mean": MeanCost}


@dataclass(frozen=True, slots=True)
class SageSchedParameters:
    """Settings of sagesched.

    cost: one of COSTS. The paper's is resource-bound (section 3.2); section 4 compares output and
        overall with it.
    index: gittins, or mean (Fig. 11).
    bucket_tokens: a running request's index is computed anew every so many tokens (section 4.1).
    """

    cost: str = "resource-bound"
    index: str = "gittins"
    bucket_tokens: int = 200

    def __post_init__(self) -> None:
        for name, known in (("cost", COSTS), ("index", INDICES)):
            value = getattr(self, name)
            require(value in known, f"policy.sagesched.{name}", value, ", ".join(known))
        require_within("policy.sagesched.bucket_tokens", self.bucket_tokens, 1, MOST)


class SageSched(Policy):
    """Serves the smallest Gittins index of the predicted cost first, and preempts for a smaller one
    (SageSched, section 3.3).

    Nothing bounds how often or how long a request waits, and a move costs nothing.
    """

    Parameters = SageSchedParameters
    most_yields = sys.maxsize

    def __init__(self, parameters: SageSchedParameters, server: ServerFacts) -> None:
        self._indices = _indices(parameters, server)
        self.refresh_interval_tokens = parameters.bucket_tokens
        super().__init__(parameters, server, self._indices)

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._indices.of(job).log_index

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return self.key(waiting, view) < self.key(running, view)


def _indices(parameters: SageSchedParameters, server: ServerFacts) -> Indices:
    class Chosen(Indices):
        cost_on = staticmethod(COSTS[parameters.cost])
        table_type = INDICES[parameters.index]
        interval_tokens = parameters.bucket_tokens

    return Chosen(server)
