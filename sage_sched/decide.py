"""The decision: what one scheduling pass does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from sage_sched.admission import Headroom
from sage_sched.chunk import Guests, guests_beside, pass_tokens, shortened
from sage_sched.departure import Departure, departure_of, make_room
from sage_sched.followed import HEAD, in_front
from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.order import serving_order
from sage_sched.plan import UNLIMITED, Action, Enter, Plan, Resume, Yield
from sage_sched.policy import Policy
from sage_sched.preemption import (
    WINDOW,
    Turn,
    anyone_would_yield,
    may_displace,
    plan_turns,
)
from sage_sched.twins import twins_of_those_served
from sage_sched.view import SchedulerView

# Every plan looks up how much is cached of so many jobs, the first to serve.
_NUM_LOOKED_UP = 8
_WORTH_IT = "its place is behind, by more than its move takes"


def decide(view: SchedulerView, policy: Policy, limits: Limits) -> Plan:
    """The plan of one pass; read it from the top. Raises what the policy raises.

    If memory runs out, the last of the order leave, and the next pass decides who enters. While a
    prompt is being chunked, jobs that go before it enter beside its next chunk, as far as they fit
    (sage_sched.chunk). When the batch is full, a job enters only by preempting one: letting
    requests trickle in, with a prefill step each while all others wait, costs more than it gains
    (srpt-oracle, H800 preset at 8 requests/s: mean TTLT 10 % above no preemption, against 1 % below
    this way).
    """
    chunked = view.chunked
    if (
        chunked is None
        and not view.is_short
        and (not view.waiting or (view.batch_is_full and not _has_news(view, policy)))
    ):
        return Plan(order=None)
    line = policy.line
    line.fair_shares = limits.fair_shares
    line.follow(view, policy)
    line.rank_anew(view, policy)
    limits.fair_shares.look(view)
    policy.on_pass(view)
    limits.swap_out.look(view, line.begun)
    headroom = policy.headroom(view, limits.sessions)
    if view.is_short and view.may_leave and (yields := make_room(view, policy, headroom)):
        return Plan(
            (),
            tuple(yields),
            budget=limits.gap.within(UNLIMITED, view),
            headroom_steps=headroom.num_steps,
        )
    joined = line.take_joined()
    order, num_open = _held_back_last(_order_by_cached(joined, policy, view), policy, view)
    places = _places(joined, order, policy)
    twins = twins_of_those_served(order[:num_open], view)
    if twins:
        others = [position for position in order[:num_open] if position not in twins]
        order, num_open = [*others, *twins, *order[num_open:]], len(others)
    budget = limits.gap.within(policy.budget(view) or UNLIMITED, view)
    if budget.prefill_tokens == 0 and view.running:
        line.ordered(order)
        return Plan(
            order,
            decode_only=True,
            budget=budget,
            headroom_steps=headroom.num_steps,
            places=places,
        )
    guests = Guests(order, num_open)
    if chunked is not None:
        guests = guests_beside(chunked, order, num_open, budget, policy, view)
    line.ordered(guests.order)
    in_order = replace(view, waiting=_in_order(guests.order, view))
    queue = in_order.waiting[: min(guests.num_guests, WINDOW)]
    turns, num_without_host_room = _turns(
        queue, guests.order, pass_tokens(budget, view), policy, headroom, in_order
    )
    if chunked is not None:
        prefilled = (turn.newcomer for turn in turns if turn.newcomer not in view.swapped)
        budget = shortened(budget, prefilled, view)
    plan = Plan(
        guests.order,
        num_open=_before_promised_swapped(guests.order, num_open, view),
        swapped_go_first=False,
        budget=budget,
        headroom_steps=headroom.num_steps,
        kept_tokens=headroom.kept_tokens,
        num_too_long=guests.num_too_long,
        places=places,
    )
    if not view.can_swap or not queue:
        return plan
    return replace(
        plan,
        actions=tuple(action for turn in turns for action in _actions(turn, view)),
        num_open=0 if view.batch_is_full else num_open - len(turns),
        swapped_go_first=True,
        is_new=chunked is None and not twins,
        num_without_host_room=num_without_host_room,
    )


def _order_by_cached(joined: Sequence[Job], policy: Policy, view: SchedulerView) -> list[int]:
    """The order in which to serve the waiting jobs. Jobs that have joined the line and the first to
    serve are looked up in the cache; for the others the last answer counts."""
    position_of = policy.line.positions.of
    _look_up([position_of(job) for job in joined if not job.was_looked_up], policy, view)
    order = serving_order(policy, view)
    if _look_up(order[:_NUM_LOOKED_UP], policy, view):
        order = serving_order(policy, view)
    return order


def _places(joined: Sequence[Job], order: Sequence[int], policy: Policy) -> dict[int, int]:
    """See Plan.places."""
    number_of = {position: number for number, position in enumerate(order)}
    places = {}
    for job in joined:
        position = policy.line.positions.of(job)
        places[position] = number_of.get(position, max(len(order), policy.line.num_ahead(job)))
    return places


def _look_up(positions: Iterable[int], policy: Policy, view: SchedulerView) -> bool:
    """Whether more or less is cached of any of these waiting jobs than was known.

    Swapped jobs need no prefill. A streaming session's job must not be looked up: it would lend
    its KV to whoever asks (SGLang's session/streaming_session.py).
    """
    has_news = False
    for position in positions:
        job = view.waiting[position]
        if job in view.swapped or job.keeps_memory:
            job.was_looked_up = True
            continue
        cached_tokens = view.cached_tokens(position)
        if job.find(cached_tokens, view.server.recall_tokens(view.host_tokens(position))):
            has_news = True
            if job.is_ranked:
                policy.on_forecast(job)
    return has_news


def _has_news(view: SchedulerView, policy: Policy) -> bool:
    """Whether the plan may have changed while the batch is full: by a new request, a new index or
    the time."""
    if not view.can_swap:
        return False
    if view.now_s >= policy.plan_by_s:
        return True
    interval = policy.refresh_interval_tokens
    return view.num_arrivals != view.num_arrivals_planned or any(
        # A step with drafts may give several tokens.
        job.generated_tokens % interval < view.server.reserve_tokens
        for job in view.running
    )


def _held_back_last(order: list[int], policy: Policy, view: SchedulerView) -> tuple[list[int], int]:
    """The order with the jobs that the policy holds back (Policy.key) at its end, and how many are
    not held back. If there is no other job, all may enter: a server must not stand still."""

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
    """How many may enter if swapped jobs are passed over: nobody passes a promised one."""
    for number, position in enumerate(order[:num_open]):
        job = view.waiting[position]
        if not job.is_promised:
            break
        if job in view.swapped:
            return number
    return num_open


def _in_order(order: Sequence[int], view: SchedulerView) -> list[Job]:
    """The waiting jobs, the first in their order. The others are in no order that all ranks share;
    unless the order is as long as may be, they are left out, as they are of the order."""
    if len(order) < HEAD:
        return [view.waiting[position] for position in order]
    return in_front(view.waiting, order)


def _turns(
    queue: Sequence[Job],
    positions: Sequence[int],
    prefill_tokens: int,
    policy: Policy,
    headroom: Headroom,
    view: SchedulerView,
) -> tuple[list[Turn], int]:
    """Who of the queue enters, and who yields to them; and how many more would have yielded if host
    memory had room for them. positions: where the queue's jobs wait, as the view is asked of them.
    prefill_tokens: the most that the pass prefills.

    If nobody may yield, this matters only beside a chunk: otherwise the engine itself finds out how
    many have room.
    """
    chunked = view.chunked
    if not queue or (not view.can_swap and (chunked is None or view.batch_is_full)):
        return [], 0
    willing = policy.preempts or view.server.level_gap < math.inf or queue[0].is_promised
    yields = view.may_leave and willing
    first = queue[0]
    if view.batch_is_full and not (
        policy.starts_now(first) or (yields and anyone_would_yield(first, policy, view))
    ):
        return [], 0
    aside_tokens = headroom.set_aside_tokens(view.running)
    free_tokens = view.room_tokens - sum(aside_tokens) - headroom.kept_tokens
    free_slots = view.free_slots
    if chunked is not None:
        free_slots -= 1
        free_tokens -= headroom.needed_tokens(chunked) - chunked.prefilled_tokens
    without_host_room: set[Job] = set()
    aside_of = dict(zip(view.running, aside_tokens, strict=True))

    def departure(job: Job) -> Departure | None:
        if (holding := view.holding(job)) is None:
            return None
        leaving = departure_of(holding, aside_of[job], view.host_free_tokens, view)
        if leaving is None:
            without_host_room.add(job)
        return leaving

    turns = plan_turns(
        (job for job in view.running if job.is_ranked),
        (
            (job, headroom.needed_tokens(job) - view.shared_tokens(position))
            for job, position in takewhile(
                lambda each: may_displace(each[0]) or each[0] in view.swapped,
                zip(queue, positions, strict=False),
            )
        ),
        free_slots=free_slots,
        free_tokens=free_tokens,
        prefill_tokens=prefill_tokens,
        policy=policy,
        view=view,
        most_yields=policy.most_yields if yields else 0,
        departure=departure,
    )
    if view.batch_is_full:
        turns = [*takewhile(lambda turn: turn.victims or policy.starts_now(turn.newcomer), turns)]
    turns = _within_host_memory(turns, without_host_room, view)
    if not turns and not view.running and chunked is None and queue[0] in view.swapped:
        # There is no other job to keep room for.
        turns = [Turn(queue[0])]
    return turns, len(without_host_room)


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
    if turn.victims:
        reason = "others yield to it"
    else:
        reason = "there is room for it" if view.running else "nobody runs"
    enters = Resume if newcomer in view.swapped else Enter
    return [
        *(Yield(victim.job, victim.departure.way, _WORTH_IT, newcomer) for victim in turn.victims),
        enters(newcomer, reason),
    ]
