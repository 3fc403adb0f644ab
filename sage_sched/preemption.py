"""Decides which waiting jobs are admitted, and which running jobs are preempted for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from typing import NamedTuple

from sage_sched.headroom import Headroom
from sage_sched.job import BEHIND, Entry, Job
from sage_sched.policy import Policy, can_preempt
from sage_sched.preemption_cost import PreemptionCost, Victim, preemption_cost_of
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import place_of


class Admission(NamedTuple):
    """A waiting job that is admitted, and the running jobs preempted for it (none if there is
    room). The newcomer may be a job that was swapped out and comes back."""

    newcomer: Job
    victims: tuple[Victim, ...] = ()


def admissions_of(
    window: Sequence[Job],
    prefill_tokens: int,
    policy: Policy,
    headroom: Headroom,
    view: SchedulerView,
    room: float = math.inf,
) -> tuple[list[Admission], int]:
    """Return the admissions of a pass, and how many more jobs would have been preempted if host
    memory had room for them.

    window: the first waiting jobs, in order.
    prefill_tokens: the maximum number of tokens that the pass prefills.
    room: see SwapOutBound.

    If KV cannot be swapped, this plans admissions only while a prompt is being chunked. Otherwise
    the engine itself finds out how many jobs have room.
    """
    chunked = view.chunked
    if not window or (not view.can_swap and (chunked is None or view.batch_is_full)):
        return [], 0
    first = window[0]
    has_cause = can_preempt(policy) or view.server.level_gap < math.inf or first.goes_first
    preempts = view.may_preempt and has_cause
    if view.batch_is_full and not (
        first.starts_now or (preempts and any_is_preemptible(first, policy, view))
    ):
        return [], 0
    aside_tokens = headroom.set_aside_tokens(view.running)
    set_aside_of = dict(zip(view.running, aside_tokens, strict=True))
    free_tokens = view.room_tokens - sum(aside_tokens) - headroom.kept_tokens
    free_slots = view.free_slots
    if chunked is not None:
        free_slots -= 1
        free_tokens -= headroom.needed_tokens(chunked) - chunked.prefilled_tokens
    without_host_room: set[Job] = set()

    def cost_of(job: Job) -> PreemptionCost | None:
        if (holding := view.kv.holding(job)) is None:
            return None
        cost = preemption_cost_of(holding, set_aside_of[job], view.host_free_tokens, view)
        if cost is None:
            without_host_room.add(job)
        return cost

    admissions = plan_admissions(
        view.running,
        (
            (job, headroom.needed_tokens(job) - view.kv.shared_tokens(job))
            for job in takewhile(lambda job: job.may_preempt_others or job in view.swapped, window)
        ),
        free_slots=free_slots,
        free_tokens=free_tokens,
        prefill_tokens=prefill_tokens,
        policy=policy,
        view=view,
        max_preemptions=policy.traits.max_preemptions if preempts else 0,
        room=room,
        cost_of=cost_of,
    )
    if view.batch_is_full:
        admissions = [*takewhile(_enters_full, admissions)]
    admissions = _within_host_memory(admissions, without_host_room, view)
    if not admissions and not view.running and chunked is None and first in view.swapped:
        # There is no other job to keep room for.
        admissions = [Admission(first)]
    return admissions, len(without_host_room)


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


def any_is_preemptible(first: Job, policy: Policy, view: SchedulerView) -> bool:
    """Whether any running job could be preempted for the first waiting one, at price zero. In most
    passes there is none, and the caller need not plan anything."""
    if not first.may_preempt_others:
        return False
    place = place_of(first, policy, view)[:2]
    return any(
        _is_preemptible(job, first, 0.0, policy, view)
        for job in view.running
        if place_of(job, policy, view)[:2] > place
    )


def may_enter_full(waiting: Iterable[Job], policy: Policy, view: SchedulerView) -> bool:
    """Whether any of these waiting jobs might enter a full batch, now or when running jobs are
    older. This saves weighing all running jobs for jobs that can make none leave."""
    if can_preempt(policy) and not policy.traits.preempts_for_starts:
        return any(True for _ in waiting)
    levels = {job.level for job in view.running}
    return any(job.goes_first or job.starts_now or levels != {job.level} for job in waiting)


def _is_preemptible(
    running: Job, waiting: Job, price_s: float, policy: Policy, view: SchedulerView
) -> bool:
    """Whether a running job is preempted, at this price, for a waiting job that goes before it.

    price_s: seconds to move the running job's KV to host memory and back.

    If the waiting job's level is better by more than ServerFacts.level_gap, or the running job's
    batch is behind, the running job is preempted at any price. Within a level the policy decides,
    unless the waiting job has passed the starvation bound or the swap-out bound (Job.goes_first):
    then the price does not count. A job with a TPOT target is preempted for a job past the swap-out
    bound, but not for one that has only passed the starvation bound. A pinned job is never
    preempted.
    """
    if running.is_pinned:
        return False
    if running.level != waiting.level:
        return running.level - waiting.level > min(view.server.level_gap, BEHIND // 2)
    if running.goes_first or not (can_preempt(policy) or waiting.goes_first):
        return False
    if waiting.is_due and not waiting.passed_starvation_bound:
        return False
    if waiting.goes_first:
        return waiting.passed_swap_out_bound or running.hints.tpot_slo_ms is None
    return policy.should_preempt(running, waiting, price_s, view)


def plan_admissions(
    running: Iterable[Job],
    candidates: Iterable[tuple[Job, int]],
    *,
    free_slots: int,
    free_tokens: int,
    prefill_tokens: int,
    policy: Policy,
    view: SchedulerView,
    max_preemptions: int,
    room: float,
    cost_of: Callable[[Job], PreemptionCost | None],
) -> list[Admission]:
    """Return the admissions of the candidates, in their order, up to the first that finds no room.

    A candidate is admitted if a slot and more tokens than it needs are free. Of the jobs that may
    be preempted for it (_is_preemptible), the last in the order are preempted first, and no more
    than needed. A job is not preempted if it has been preempted max_preemptions times, or if only
    tokens are short and it would free none.

    The candidate that uses up prefill_tokens is the last to be admitted. The engine leaves the next
    prompts in its queue, and a swapped job behind them would overtake them.

    running: the running jobs.
    candidates: the waiting jobs, each with the number of tokens that its admission needs.
    cost_of: returns the cost of preempting a running job; None if host memory has no room for its
        KV, or the engine pins it. It takes long, so it is called only for jobs that would be
        preempted at price zero.
    """
    gone = set[Job]()

    @cache  # in most passes there is room, and no job is preempted
    def last_first() -> list[Entry]:
        may_leave = (job for job in running if job.num_preemptions < max_preemptions)
        places = ((*place_of(job, policy, view), job) for job in may_leave)
        return sorted(places, reverse=True)

    def preemptible(newcomer: Job) -> Iterator[Victim]:
        if not may_enter_full([newcomer], policy, view):
            return
        if room <= 0 and not newcomer.goes_first:
            return
        place = place_of(newcomer, policy, view)[:2]
        for level, key, _, job in last_first():
            if (level, key) <= place:
                return
            if (
                job not in gone
                and _is_preemptible(job, newcomer, 0.0, policy, view)
                and (cost := cost_of(job)) is not None
                and _is_preemptible(job, newcomer, cost.price_s, policy, view)
            ):
                yield Victim(job, cost)

    admissions = []
    extra_reserved_tokens = 0
    for newcomer, needed_tokens in candidates:
        # SGLang reserves more tokens for prompts than they need. A swapped job behind them must not
        # take that room, or it would overtake a prompt for which no room is left.
        if newcomer in view.swapped:
            needed_tokens += extra_reserved_tokens
        short_tokens = needed_tokens + 1 - free_tokens
        victims = _enough(preemptible(newcomer), 1 - free_slots, short_tokens)
        if victims is None:
            break
        free_slots += len(victims) - 1
        free_tokens += sum(victim.cost.freed_tokens for victim in victims) - needed_tokens
        gone.update(victim.job for victim in victims)
        room -= len(victims)
        admissions.append(Admission(newcomer, tuple(victims)))
        if newcomer in view.swapped:
            extra_reserved_tokens = 0  # now subtracted from free_tokens
        else:
            extra_reserved_tokens += _extra_reserved(newcomer, view)
            prefill_tokens -= view.uncached_tokens(newcomer)
            if prefill_tokens <= 0:
                break
    return admissions


def _extra_reserved(newcomer: Job, view: SchedulerView) -> int:
    """Return how many tokens SGLang's PrefillAdder._update_prefill_budget reserves for a prompt
    beyond those that it needs. SGLang rounds up to whole pages, and counts the tokens of a begun
    answer twice."""
    begun_tokens = newcomer.generated_tokens
    uncached_tokens = newcomer.input_tokens + begun_tokens - newcomer.cached_tokens
    return begun_tokens + view.uncached_tokens(newcomer) - uncached_tokens


def _enough(
    preemptible: Iterator[Victim], short_slots: int, short_tokens: int
) -> list[Victim] | None:
    """Return the first victims that together free enough; None if all together free too little.

    A victim is left out if later ones free enough without it.

    short_slots, short_tokens: how many are missing; 0 or less if none.
    """
    chosen: list[Victim] = []
    while short_slots > 0 or short_tokens > 0:
        victim = next(preemptible, None)
        if victim is None:
            return None
        if short_slots > 0 or victim.cost.freed_tokens > 0:
            chosen.append(victim)
            short_slots -= 1
            short_tokens -= victim.cost.freed_tokens
    for victim in reversed(chosen[:-1]):  # jobs with better keys go on running
        freed_tokens = victim.cost.freed_tokens
        if short_slots < 0 and short_tokens + freed_tokens <= 0:
            chosen.remove(victim)
            short_slots += 1
            short_tokens += freed_tokens
    return chosen
