"""Decides which waiting jobs are admitted, and completes a plan with them and with the jobs that
are preempted for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import sub
from typing import NamedTuple

from sage_sched.candidates import Candidates
from sage_sched.followed import in_front
from sage_sched.headroom import Headroom
from sage_sched.job import Job
from sage_sched.plan import WINDOW, Action, Admit, Budget, Lacking, Plan, Preempt, Resume
from sage_sched.policy import Policy
from sage_sched.preemption import Preemptible, Victim, any_is_preemptible
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import most_ordered

# The memory that a job lacks is computed anew after this share of the running jobs has ended,
# because headroom and shared prefixes change.
_STEADY_SHARE = 1 / 8


class Admissions(NamedTuple):
    """The admissions of a pass.

    stops: whether they stop at a job that finds no room.
    num_without_host_room: how many more jobs would have been preempted if host memory had room.
    lacking: see Plan.
    """

    admissions: Sequence[Admission] = ()
    stops: bool = False
    num_without_host_room: int = 0
    lacking: Lacking | None = None


class Admission(NamedTuple):
    """A waiting job that is admitted, and the running jobs preempted for it (none if there is
    room). The newcomer may be a job that was swapped out and comes back."""

    newcomer: Job
    victims: tuple[Victim, ...] = ()


def with_admissions(
    plan: Plan,
    candidates: Candidates,
    budget: Budget,
    pass_tokens: int,
    policy: Policy,
    headroom: Headroom,
    view: SchedulerView,
    room: float,
) -> Plan:
    """Return the plan with the jobs that are admitted and preempted.

    pass_tokens: the most that the pass prefills. room: see SwapOutBound.
    """
    found = _admissions(candidates, pass_tokens, policy, headroom, view, room)
    admissions = found.admissions
    budget = _shortened(budget, pass_tokens, admissions, view)
    if not view.can_swap or not candidates.num_first:
        num_open = candidates.num_before_swapped(view)
        return replace(plan, budget=budget, num_open=num_open, swapped_go_first=False)
    num_open = candidates.num_open - len(admissions)
    return replace(
        plan,
        budget=budget,
        actions=(
            *plan.actions,
            *(action for one in admissions for action in _actions(one, view)),
        ),
        num_open=0 if view.batch_is_full else min(num_open, 1) if found.stops else num_open,
        is_new=view.chunked is None and not candidates.has_followers,
        num_without_host_room=found.num_without_host_room,
        lacking=found.lacking,
    )


def _admissions(
    candidates: Candidates,
    pass_tokens: int,
    policy: Policy,
    headroom: Headroom,
    view: SchedulerView,
    room: float,
) -> Admissions:
    """Return the admissions of a pass.

    If KV cannot be swapped, this plans admissions only while a prompt is being chunked. Otherwise
    the engine itself finds out how many jobs have room.
    """
    chunked, order = view.chunked, candidates.order
    window = [view.waiting[position] for position in order[: min(candidates.num_first, WINDOW)]]
    if not window or (not view.can_swap and (chunked is None or view.batch_is_full)):
        return Admissions()
    first = window[0]
    has_cause = policy.can_preempt or view.server.level_gap < math.inf or first.goes_first
    preempts = view.may_preempt and has_cause and len(view.running) > 0
    if preempts:
        view = replace(view, waiting=_in_order(order, view))
    if view.batch_is_full and not (
        first.starts_now or (preempts and any_is_preemptible(first, policy, view))
    ):
        return Admissions(stops=True)
    aside_tokens = headroom.set_aside_tokens(view.running)
    free_tokens = view.room_tokens - sum(aside_tokens) - headroom.kept_tokens
    free_slots = view.free_slots
    if chunked is not None:
        free_slots -= 1
        free_tokens -= headroom.needed_tokens(chunked) - chunked.prefilled_tokens
    preemptible = Preemptible(policy, view, aside_tokens, room) if preempts else None
    # No job is preempted for a job that keeps its memory after its answer: it might never get its
    # own memory back.
    window = [*takewhile(lambda job: not job.keeps_memory or job in view.swapped, window)]
    needed = [*map(headroom.needed_tokens, window)]
    shared = map(view.kv.shared_tokens, window)  # slow: only for jobs that are admitted
    admissions, needed_tokens = plan_admissions(
        zip(window, map(sub, needed, shared), strict=False),
        free_slots=free_slots,
        free_tokens=free_tokens,
        prefill_tokens=pass_tokens,
        preemptible=preemptible,
        view=view,
    )
    num_planned = len(admissions)
    if view.batch_is_full:
        admissions = [*takewhile(_enters_full, admissions)]
    without_host_room = set() if preemptible is None else preemptible.without_host_room
    admissions = _within_host_memory(admissions, without_host_room, view)
    if not admissions and not view.running and chunked is None and first in view.swapped:
        # There is no other job to keep room for.
        admissions = [Admission(first)]
    stops = needed_tokens is not None or len(admissions) < num_planned
    is_as_planned = len(admissions) == num_planned and not any(one.victims for one in admissions)
    lacking = None
    if needed_tokens and is_as_planned and _is_steady(candidates, headroom, view):
        aside_tokens += [headroom.left_tokens(one.newcomer) for one in admissions]
        num_ends = int(_STEADY_SHARE * len(view.running))
        lacking = Lacking(window[num_planned], needed_tokens + sum(aside_tokens), num_ends)
    return Admissions(admissions, stops, len(without_host_room), lacking)


def _is_steady(candidates: Candidates, headroom: Headroom, view: SchedulerView) -> bool:
    """Whether the memory that a job needs to enter changes little while others go on."""
    if view.chunked is not None or candidates.has_followers or headroom.kept_tokens:
        return False
    return not any(job.is_pinned for job in view.running)


def _enters_full(admission: Admission) -> bool:
    """Whether a job enters a batch that is marked as full."""
    newcomer = admission.newcomer
    return bool(admission.victims) or newcomer.goes_first or newcomer.starts_now


def _within_host_memory(
    admissions: Sequence[Admission], without_host_room: set[Job], view: SchedulerView
) -> list[Admission]:
    """Return the first admissions whose victims together have room in host memory."""
    host_free_tokens = view.host_free_tokens
    kept: list[Admission] = []
    for one in admissions:
        host_free_tokens -= sum(victim.cost.host_tokens for victim in one.victims)
        if host_free_tokens < 0:
            without_host_room.update(victim.job for victim in one.victims)
            break
        kept.append(one)
    return kept


def plan_admissions(
    candidates: Iterable[tuple[Job, int]],
    *,
    free_slots: int,
    free_tokens: int,
    prefill_tokens: int,
    preemptible: Preemptible | None,
    view: SchedulerView,
) -> tuple[list[Admission], int | None]:
    """Return the admissions of the candidates, in their order, up to the first that finds no room,
    and how many tokens have to be free for that one. None: all find room. 0: a slot is lacking.

    A candidate is admitted if a slot and more tokens than it needs are free, or if enough running
    jobs may be preempted for it.

    The candidate that uses up prefill_tokens is the last to be admitted. The engine leaves the next
    prompts in its queue, and a swapped job behind them would overtake them.

    candidates: the waiting jobs, each with the number of tokens that its admission needs.
    preemptible: None if no job is preempted.
    """
    admissions: list[Admission] = []
    extra_reserved_tokens = 0
    for newcomer, needed_tokens in candidates:
        # SGLang reserves more tokens for prompts than they need. A swapped job behind them must not
        # take that room, or it would overtake a prompt for which no room is left.
        if newcomer in view.swapped:
            needed_tokens += extra_reserved_tokens
        short_slots, short_tokens = 1 - free_slots, needed_tokens + 1 - free_tokens
        victims: list[Victim] = []
        if short_slots > 0 or short_tokens > 0:
            if preemptible is not None:
                victims = preemptible.enough(newcomer, short_slots, short_tokens)
            if not victims:
                return admissions, 0 if short_slots > 0 else needed_tokens + 1
        free_slots += len(victims) - 1
        free_tokens += sum(victim.cost.freed_tokens for victim in victims) - needed_tokens
        admissions.append(Admission(newcomer, tuple(victims)))
        if newcomer in view.swapped:
            extra_reserved_tokens = 0  # now subtracted from free_tokens
            continue
        # As in SGLang's PrefillAdder._update_prefill_budget, which rounds up to whole pages, and
        # counts the tokens of a begun answer twice.
        begun_tokens = newcomer.generated_tokens
        uncached_tokens = newcomer.input_tokens + begun_tokens - newcomer.cached_tokens
        paged_tokens = -(-uncached_tokens // view.page_size) * view.page_size
        extra_reserved_tokens += begun_tokens + paged_tokens - uncached_tokens
        prefill_tokens -= paged_tokens
        if prefill_tokens <= 0:
            break
    return admissions, None


def _in_order(order: Sequence[int], view: SchedulerView) -> list[Job]:
    """Return the waiting jobs, first those of the order.

    The other jobs are in no order that all ranks share, so they are left out. Only if the order has
    its full length do they follow as they are.
    """
    if len(order) < most_ordered(view):
        return [view.waiting[position] for position in order]
    return in_front(view.waiting, order)


def _shortened(
    budget: Budget, pass_tokens: int, admissions: Sequence[Admission], view: SchedulerView
) -> Budget:
    """Return the budget with a chunk that is shorter by the prompts piggybacked on it."""
    if view.chunked is None:
        return budget
    newcomers = [one.newcomer for one in admissions if one.newcomer not in view.swapped]
    reserved_tokens = sum(map(view.uncached_tokens, newcomers))
    if not reserved_tokens:
        return budget
    chunk_tokens = max(view.page_size, pass_tokens - reserved_tokens)
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
