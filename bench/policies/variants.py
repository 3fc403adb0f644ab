"""Policies of ours with one thing changed or left out."""

from __future__ import annotations

from sage_sched.index import Indices, MeanCost
from sage_sched.job import Job
from sage_sched.policies.sage import Sage
from sage_sched.policy import Policy
from sage_sched.steps import Cost, ServerFacts, num_steps
from sage_sched.urgency import Urgency
from sage_sched.view import SchedulerView


def resource_bound_cost(server: ServerFacts) -> Cost:
    """KV tokens held, summed over decode steps; attention work grows alike (SageSched, eq. 2)."""
    return lambda input_tokens, output_tokens, cached_tokens=0: (
        output_tokens * output_tokens / 2 + input_tokens * output_tokens
    )


def output_cost(server: ServerFacts) -> Cost:
    """Decode steps (SageSched, Fig. 10)."""
    return num_steps


def overall_cost(server: ServerFacts) -> Cost:
    """Tokens, an output token priced as two of input (SageSched, Fig. 10)."""
    return lambda input_tokens, output_tokens, cached_tokens=0: (
        input_tokens - cached_tokens + 2.0 * output_tokens
    )


class _OutputIndices(Indices):
    cost_on = staticmethod(output_cost)


class _OverallIndices(Indices):
    cost_on = staticmethod(overall_cost)


class _ResourceBoundIndices(Indices):
    cost_on = staticmethod(resource_bound_cost)


class _MeanIndices(Indices):
    table_type = MeanCost


class SageOutput(Sage):
    """sage by the decode steps that an answer takes."""

    indices_type = _OutputIndices


class SageOverall(Sage):
    """sage by tokens."""

    indices_type = _OverallIndices


class SageResourceBound(Sage):
    """sage by the paper's cost."""

    indices_type = _ResourceBoundIndices


class SageMean(Sage):
    """sage by the mean remaining cost in the place of the Gittins index (SageSched, Fig. 11)."""

    indices_type = _MeanIndices


class UrgencyOrder(Urgency):
    """urgency without yields."""

    should_preempt = Policy.should_preempt


class UrgencyArrival(Urgency):
    """urgency with the jobs of a bucket by arrival."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._bucket(job)
