"""Completes a plan with the jobs that are admitted, and those that are preempted for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sage_sched.candidates import Candidates
from sage_sched.followed import in_front
from sage_sched.headroom import Headroom
from sage_sched.job import Job
from sage_sched.order import most_ordered
from sage_sched.plan import Action, Admit, Budget, Plan, Preempt, Resume
from sage_sched.policy import Policy
from sage_sched.preemption import Admission, admissions_of
from sage_sched.view import SchedulerView


def with_admissions(
    plan: Plan,
    candidates: Candidates,
    budget: Budget,
    policy: Policy,
    headroom: Headroom,
    view: SchedulerView,
    room: float,
) -> Plan:
    """Return the plan with the jobs that are admitted and preempted."""
    in_order = replace(view, waiting=_in_order(candidates.order, view))
    window = candidates.window(view)
    admissions, num_without_host_room = admissions_of(
        window, view.pass_limit(budget), policy, headroom, in_order, room
    )
    budget = _shortened(budget, admissions, view)
    if not view.can_swap or not window:
        num_open = candidates.num_before_swapped(view)
        return replace(plan, budget=budget, num_open=num_open, swapped_go_first=False)
    return replace(
        plan,
        budget=budget,
        actions=(
            *plan.actions,
            *(action for one in admissions for action in _actions(one, view)),
        ),
        num_open=0 if view.batch_is_full else candidates.num_open - len(admissions),
        is_new=view.chunked is None and not candidates.has_followers,
        num_without_host_room=num_without_host_room,
    )


def _in_order(order: Sequence[int], view: SchedulerView) -> list[Job]:
    """Return the waiting jobs, first those of the order.

    The other jobs are in no order that all ranks share, so they are left out. Only if the order has
    its full length do they follow as they are.
    """
    if len(order) < most_ordered(view):
        return [view.waiting[position] for position in order]
    return in_front(view.waiting, order)


def _shortened(budget: Budget, admissions: Sequence[Admission], view: SchedulerView) -> Budget:
    """Return the budget with a chunk that is shorter by the prompts piggybacked on it."""
    if view.chunked is None:
        return budget
    newcomers = [one.newcomer for one in admissions if one.newcomer not in view.swapped]
    reserved_tokens = sum(map(view.uncached_tokens, newcomers))
    if not reserved_tokens:
        return budget
    chunk_tokens = max(view.page_size, view.pass_limit(budget) - reserved_tokens)
    return replace(budget, chunk_tokens=min(chunk_tokens, budget.chunk_tokens or chunk_tokens))


def _actions(admission: Admission, view: SchedulerView) -> list[Action]:
    newcomer = admission.newcomer
    reason = "there is room for it" if view.running else "no other job runs"
    if admission.victims:
        reason = "others are preempted for it"
    enters = Resume if newcomer in view.swapped else Admit
    why = "another job goes before it"
    preempted = (
        Preempt(victim.job, victim.cost.mode, why, newcomer) for victim in admission.victims
    )
    return [*preempted, enters(newcomer, reason)]
