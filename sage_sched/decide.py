"""Decides what one scheduling pass does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sage_sched.candidates import Candidates
from sage_sched.followed import in_front
from sage_sched.headroom import Headroom
from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.order import most_ordered, serving_order
from sage_sched.plan import UNLIMITED, Action, Admit, Budget, Plan, Preempt, Resume
from sage_sched.policy import Policy
from sage_sched.preemption import Admission, admissions_of, may_enter_full
from sage_sched.preemption_cost import preempt_for_memory
from sage_sched.view import Holding, SchedulerView

# A plan looks up the cached prefixes of this many jobs at the head of the queue.
_NUM_LOOKED_UP = 8


def decide(view: SchedulerView, policy: Policy, limits: Limits) -> Plan:
    """Return the plan of one pass. Raises what the policy raises.

    1. If memory runs out, preempt running jobs. The next pass decides which jobs are admitted. If
       another adapter has its turn (Adapters), preempt jobs for it, and go on.
    2. Look the new jobs up in the cache, and order all. If the batch is full and none can enter,
       the plan ends here. Otherwise look up the first jobs, too.
    3. Narrow them to the jobs that may be admitted (Candidates). While a prompt is being chunked,
       these are the jobs that are piggybacked on its next chunk.
    4. Decide which of them are admitted, and which running jobs are preempted for them. If KV
       cannot be swapped, the engine itself admits in this order.

    If SGLang has marked the batch as full, a job is admitted only if it preempts another, goes
    first, or its start is due (Policy.starts_now). Admitting others one by one as room appears,
    with a prefill step each, costs more than it gains: mean TTLT was 10 % above that without
    preemption, and with this rule is 1 % below it (srpt-oracle, H800 preset at 8 requests/s).
    """
    if not _needs_plan(view, policy):
        return Plan(order=None)
    queue = policy.queue
    queue.interleaving, queue.adapters = limits.interleaving, limits.adapters
    queue.follow(view, policy)
    queue.rank_anew(view, policy)
    limits.interleaving.look(view)
    policy.plan_by_s, policy.plan_by_tokens, policy.heeds_ages = math.inf, math.inf, True
    policy.on_pass(view)
    limits.swap_out.check(view, queue.begun)
    headroom = policy.headroom(view, limits.sessions)
    plan = Plan((), headroom_steps=headroom.num_steps)
    if view.is_short and view.may_preempt:
        preempted = preempt_for_memory(view, policy, headroom)
        if preempted:
            budget = limits.gap.within(UNLIMITED, view)
            return replace(plan, actions=tuple(preempted), budget=budget)
    moved = limits.adapters.look(view)
    policy.plan_by_s = min(policy.plan_by_s, limits.adapters.plan_by_s)
    if moved:
        view = _without(moved, view)

    joined = queue.take_joined()
    _look_up([queue.positions.of(job) for job in joined if not job.was_looked_up], policy, view)
    order = serving_order(policy, view)
    first = [view.waiting[position] for position in order]
    policy.heeds_ages = may_enter_full(first, policy, view)
    if not policy.heeds_ages:
        policy.plan_by_s = min(policy.plan_by_s, limits.swap_out.next_s)
    if view.batch_is_full and view.can_swap and view.chunked is None and not policy.heeds_ages:
        queue.ordered(order)
        places = _places(joined, order, policy)
        return replace(
            plan, order=order, kept_tokens=headroom.kept_tokens, is_new=True, places=places
        )
    if _look_up(order[:_NUM_LOOKED_UP], policy, view):
        order = serving_order(policy, view)
    candidates = Candidates(order, len(order), len(order))
    candidates = candidates.without_held_back(policy, view)
    places = _places(joined, candidates.order, policy)
    candidates = candidates.without_followers(view)
    budget = limits.gap.within(policy.budget(view) or UNLIMITED, view)
    decode_only = budget.prefill_tokens == 0 and bool(view.running)
    if not decode_only:
        candidates = candidates.beside_chunk(view.chunked, budget, policy, view)
    queue.ordered(candidates.order)
    if decode_only:
        return replace(plan, order=candidates.order, budget=budget, places=places, decode_only=True)
    plan = replace(
        plan,
        order=candidates.order,
        places=places,
        actions=tuple(action for action, _ in moved),
        has_turn=bool(moved),
        kept_tokens=headroom.kept_tokens,
        num_too_long=candidates.num_too_long,
    )
    room_tokens = limits.swap_out.room_tokens
    return _with_admissions(plan, candidates, budget, policy, headroom, view, room_tokens)


def _with_admissions(
    plan: Plan,
    candidates: Candidates,
    budget: Budget,
    policy: Policy,
    headroom: Headroom,
    view: SchedulerView,
    room_tokens: float,
) -> Plan:
    """Return the plan with the jobs that are admitted and preempted."""
    in_order = replace(view, waiting=_in_order(candidates.order, view))
    window = candidates.window(view)
    admissions, num_without_host_room = admissions_of(
        window, candidates.order, view.pass_limit(budget), policy, headroom, in_order, room_tokens
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


def _without(moved: Sequence[tuple[Preempt, Holding]], view: SchedulerView) -> SchedulerView:
    """Return the view as it will be when these running jobs have been swapped out."""
    gone = {action.job for action, _ in moved}
    freed_tokens = sum(holding.freed_tokens for _, holding in moved)
    return replace(
        view,
        running=[job for job in view.running if job not in gone],
        batch_is_full=False,
        free_slots=view.free_slots + len(gone),
        free_tokens=view.free_tokens + freed_tokens,
        locked_tokens=view.locked_tokens - freed_tokens,
        host_free_tokens=view.host_free_tokens - sum(holding.kv_tokens for _, holding in moved),
    )


def _needs_plan(view: SchedulerView, policy: Policy) -> bool:
    """Whether a plan may change anything."""
    if view.chunked is not None or view.is_short:
        return True
    if not view.waiting or not view.batch_is_full:
        return bool(view.waiting)
    return view.can_swap and may_have_changed(
        policy,
        view.now_s,
        view.served_tokens,
        view.num_arrivals != view.num_arrivals_planned,
        (job.generated_tokens for job in view.running),
        view.server.reserve_tokens,
    )


def may_have_changed(
    policy: Policy,
    now_s: float,
    served_tokens: int,
    has_arrivals: bool,
    ages: Iterable[int],
    most_tokens: int,
) -> bool:
    """Whether the plan of a full batch may have changed since the last one: by the time, the work
    done, a new request, or the index of a running one.

    ages: how many tokens each running request has generated.
    most_tokens: the most that a step gives a request. Speculative decoding may give several.
    """
    if has_arrivals or now_s >= policy.plan_by_s:
        return True
    if not policy.heeds_ages:
        return served_tokens > policy.plan_by_tokens
    interval = policy.refresh_interval_tokens
    return any(age % interval < most_tokens for age in ages)


def _look_up(positions: Iterable[int], policy: Policy, view: SchedulerView) -> bool:
    """Look these waiting jobs up in the cache; return whether the cached tokens of any have
    changed.

    Swapped jobs need no prefill. A streaming session's job must not be looked up: it would lend its
    KV to any other job that asks (SGLang's session/streaming_session.py).
    """
    has_changed = False
    for position in positions:
        job = view.waiting[position]
        if job in view.swapped or job.keeps_memory:
            job.was_looked_up = True
            continue
        cached_tokens = view.cached_tokens(position)
        if job.find(cached_tokens, view.server.recall_tokens(view.host_tokens(position))):
            has_changed = True
            if job.is_ranked:
                policy.on_prediction(job)
    return has_changed


def _places(joined: Sequence[Job], order: Sequence[int], policy: Policy) -> dict[int, int]:
    """Return Plan.places."""
    queue = policy.queue
    number_of = {position: number for number, position in enumerate(order)}
    positions = {queue.positions.of(job): job for job in joined}
    return {
        position: number_of.get(position, max(len(order), queue.num_ahead(job)))
        for position, job in positions.items()
    }


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
