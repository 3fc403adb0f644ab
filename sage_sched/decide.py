"""The decision: what one scheduling pass does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from sage_sched.admission import Admission
from sage_sched.job import Job
from sage_sched.order import rank_anew, serving_order
from sage_sched.plan import UNLIMITED, Action, Enter, Plan, Resume, Yield
from sage_sched.policy import Policy
from sage_sched.preemption import (
    WINDOW,
    Candidate,
    Departure,
    Turn,
    anyone_would_yield,
    departure_of,
    may_displace,
    plan_turns,
)
from sage_sched.view import SchedulerView

_WORTH_IT = "its place is behind, by more than its move takes"


def decide(view: SchedulerView, policy: Policy, admission: Admission) -> Plan:
    """The plan of one pass, to be read from the top. Raises what the policy raises.

    While a prompt is being chunked nobody yields and nobody comes back. A full batch takes in those
    alone to whom others yield: letting requests trickle in, a prefill step each while all others
    wait, costs more than it gains (srpt-oracle, H800 preset at 8 requests/s: mean TTLT 10 % above
    no preemption, against 1 % below this way).
    """
    if view.chunked is None and view.batch_is_full and not _has_news(view, policy):
        return Plan(order=None)
    rank_anew(view.waiting, policy)
    rank_anew(view.running, policy)
    policy.on_pass(view)
    order = serving_order(policy, view)
    order, num_open = _held_back_last(order, policy, view)
    budget = policy.budget(view) or UNLIMITED
    if budget.prefill_tokens == 0 and view.running:
        return Plan(order, decode_only=True, budget=budget)
    if view.chunked is not None or view.preemption is None or not num_open:
        num_open = _before_promised_swapped(order, num_open, view)
        return Plan(order, num_open=num_open, swapped_go_first=False, budget=budget)
    in_order = replace(view, waiting=[view.waiting[position] for position in order])
    queue = in_order.waiting[: min(num_open, WINDOW)]
    turns, num_without_host_room = _turns(queue, policy, admission, in_order)
    return Plan(
        order,
        actions=tuple(action for turn in turns for action in _actions(turn, view)),
        num_open=0 if view.batch_is_full else num_open - len(turns),
        budget=budget,
        is_new=True,
        num_without_host_room=num_without_host_room,
    )


def _has_news(view: SchedulerView, policy: Policy) -> bool:
    """While the batch is full, a plan can only change with a new request or a new index."""
    if view.preemption is None:
        return False
    interval = policy.refresh_interval_tokens
    return view.num_arrivals != view.num_arrivals_planned or any(
        job.generated_tokens % interval == 0 for job in view.running
    )


def _held_back_last(order: list[int], policy: Policy, view: SchedulerView) -> tuple[list[int], int]:
    """The order with those at its end that the policy holds back (Policy.key), and how many are
    not. If there is nobody else, none is: a server must not stand still."""

    def is_held_back(position: int) -> bool:
        job = view.waiting[position]
        return job.is_ranked and policy.key(job, view) == math.inf

    last_ranked = next((p for p in reversed(order) if view.waiting[p].is_ranked), None)
    if last_ranked is None or not is_held_back(last_ranked):
        return order, len(order)
    held_back = [position for position in order if is_held_back(position)]
    if len(held_back) == len(order) and not view.running and view.chunked is None:
        return order, len(order)
    others = [position for position in order if not is_held_back(position)]
    return others + held_back, len(others)


def _before_promised_swapped(order: list[int], num_open: int, view: SchedulerView) -> int:
    """How many may enter where swapped jobs are passed over: not past one that is promised."""
    for number, position in enumerate(order[:num_open]):
        job = view.waiting[position]
        if not job.is_promised:
            break
        if job in view.swapped:
            return number
    return num_open


def _turns(
    queue: Sequence[Job], policy: Policy, admission: Admission, view: SchedulerView
) -> tuple[list[Turn], int]:
    """Who of the first of the queue gets in, and who yields to them; and how many would have
    yielded, had host memory room for them."""
    if view.batch_is_full and not anyone_would_yield(queue[0], policy, view):
        return [], 0
    aside_tokens = admission.set_aside_tokens(view.running, view.expected_share, view.page_size)
    without_host_room: set[Job] = set()
    assert view.preemption is not None
    turns = plan_turns(
        (job for job in view.running if job.is_ranked),
        [
            Candidate(job, admission.needed_tokens(job, view.page_size))
            for job in takewhile(may_displace, queue)
        ],
        free_slots=view.free_slots,
        free_tokens=view.room_tokens - int(sum(aside_tokens)),
        policy=policy,
        view=view,
        max_yields=view.preemption.max_yields,
        departure=_departure(aside_tokens, without_host_room, view),
    )
    if view.batch_is_full:
        turns = [*takewhile(lambda turn: turn.victims, turns)]
    turns = _within_host_memory(turns, without_host_room, view)
    if not turns and not view.running and queue[0] in view.swapped:
        # There is less to fear than admission does: nobody else runs.
        turns = [Turn(queue[0])]
    return turns, len(without_host_room)


def _departure(
    aside_tokens: Sequence[float], without_host_room: set[Job], view: SchedulerView
) -> Callable[[Job], Departure | None]:
    aside_of = dict(zip(view.running, aside_tokens, strict=True))

    def departure(job: Job) -> Departure | None:
        holding = view.holding(job)
        if holding is None:
            return None
        leaving = departure_of(holding, int(aside_of[job]), view.host_free_tokens, view)
        if leaving is None:
            without_host_room.add(job)
        return leaving

    return departure


def _within_host_memory(
    turns: Sequence[Turn], without_host_room: set[Job], view: SchedulerView
) -> list[Turn]:
    """The first of the turns whose victims together have room in host memory."""
    host_free_tokens = view.host_free_tokens
    kept: list[Turn] = []
    for turn in turns:
        host_free_tokens -= sum(victim.departure.host_tokens for victim in turn.victims)
        if host_free_tokens < 0:
            without_host_room.update(victim.job for victim in turn.victims)
            break
        kept.append(turn)
    return kept


def _actions(turn: Turn, view: SchedulerView) -> list[Action]:
    newcomer = turn.newcomer
    actions: list[Action] = [
        Yield(victim.job, newcomer, victim.departure.way, _WORTH_IT) for victim in turn.victims
    ]
    if turn.victims:
        reason = "others yield to it"
    else:
        reason = "there is room for it" if view.running else "nobody runs"
    enters = Resume if newcomer in view.swapped else Enter
    return [*actions, enters(newcomer, reason)]
