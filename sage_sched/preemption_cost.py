"""Computes the cost of preempting a running job, and picks the jobs to preempt if memory runs
out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sage_sched.headroom import Headroom
from sage_sched.job import Job
from sage_sched.plan import Preempt, PreemptionMode
from sage_sched.policy import Policy
from sage_sched.view import Holding, SchedulerView
from sage_sched.waiting_queue import place_of

_MEMORY_RUNS_OUT = "memory runs out, and it is the last of the order"


class PreemptionCost(NamedTuple):
    """The cost and the gain of preempting a running job.

    mode: where its KV stays.
    price_s: seconds that the server takes to move it out and back.
    freed_tokens: KV that no other job holds, plus the KV set aside for the job's next steps.
    host_tokens: KV that goes to host memory.
    """

    mode: PreemptionMode
    price_s: float
    freed_tokens: int
    host_tokens: int = 0


class Victim(NamedTuple):
    """A running job that is preempted."""

    job: Job
    cost: PreemptionCost


def preemption_cost_of(
    holding: Holding,
    aside_tokens: int,
    host_free_tokens: int,
    view: SchedulerView,
    *,
    is_last_resort: bool = False,
) -> PreemptionCost | None:
    """Return the cost of preempting a job with this holding; None if its KV would have to be
    recomputed and must not be.

    All of its KV goes to host memory if there is room. It is recomputed only as a last resort,
    because recomputed KV is rounded differently, which may change sampled text.

    is_last_resort: memory runs out. The engine itself would recompute the KV, so the plan may too.
    """
    freed_tokens = holding.freed_tokens + aside_tokens
    if holding.kv_tokens <= host_free_tokens:
        swap_s = view.server.swap_s(holding.kv_tokens)
        return PreemptionCost(PreemptionMode.SWAP, swap_s, freed_tokens, holding.kv_tokens)
    if holding.stays_whole or not is_last_resort:
        return None
    recompute_s = view.server.recompute_s(holding.kv_tokens, holding.cached_tokens)
    return PreemptionCost(PreemptionMode.RECOMPUTE, recompute_s, freed_tokens)


def retention_order(jobs: Sequence[Job], policy: Policy, view: SchedulerView) -> list[int]:
    """Return the positions of running jobs, from the first to keep to the first to retract. Pinned
    jobs (Job.is_pinned) come before all others."""
    places = [(not job.is_pinned, place_of(job, policy, view)) for job in jobs]
    return sorted(range(len(jobs)), key=places.__getitem__)


def preempt_for_memory(view: SchedulerView, policy: Policy, headroom: Headroom) -> list[Preempt]:
    """Return the jobs to preempt if memory runs out: from the end of the order, until the others
    have their headroom. The first job of the order, or a prompt that is being chunked, goes on.

    Only the place in the order counts. Picking the jobs with the most or the least KV from the last
    quarter of the order was no better (H800 preset, four loads: mean TTLT within 1 %).
    """
    needed_tokens = headroom.next_steps_tokens(view.running)
    short_tokens = sum(needed_tokens) - view.room_tokens
    order = retention_order(view.running, policy, view)
    if view.chunked is None:
        order = order[1:]
    else:
        short_tokens += headroom.needed_tokens(view.chunked) - view.chunked.prefilled_tokens
    host_free_tokens = view.host_free_tokens
    preempted: list[Preempt] = []
    for position in reversed(order):
        if short_tokens <= 0:
            break
        job = view.running[position]
        if job.is_pinned:
            break  # they are the first of the order
        holding = view.kv.holding(job)
        if holding is None or not holding.freed_tokens:
            continue
        aside_tokens = needed_tokens[position]
        cost = preemption_cost_of(
            holding, aside_tokens, host_free_tokens, view, is_last_resort=True
        )
        if cost is None:
            continue
        host_free_tokens -= cost.host_tokens
        short_tokens -= cost.freed_tokens
        preempted.append(Preempt(job, cost.mode, _MEMORY_RUNS_OUT))
    return preempted
