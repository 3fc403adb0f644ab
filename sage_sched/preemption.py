"""Which running jobs yield to which waiting ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from sage_sched.departure import Departure, Victim
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView

# How many waiting jobs a plan looks at.
WINDOW = 16


class Turn(NamedTuple):
    """A waiting job that enters, and the running ones that yield to it (none: there is room)."""

    newcomer: Job
    victims: tuple[Victim, ...] = ()


def anyone_would_yield(first: Job, policy: Policy, view: SchedulerView) -> bool:
    """Whether a running job would yield to the first waiting one at price zero. In most passes none
    would, which saves the rest of the work."""
    if not may_displace(first):
        return False
    place = _place(first, policy, view)
    return any(
        (job.level, policy.key(job, view)) > place and _would_yield(job, first, 0.0, policy, view)
        for job in view.running
        if job.is_ranked
    )


def _place(waiting: Job, policy: Policy, view: SchedulerView) -> tuple[float, float]:
    """Those of its level and a larger key, and of a worse level, may yield to it."""
    return waiting.level, -math.inf if waiting.is_promised else policy.key(waiting, view)


def _would_yield(
    running: Job, waiting: Job, price_s: float, policy: Policy, view: SchedulerView
) -> bool:
    """Whether a running job makes room for one that goes before it: of another level, at any price
    if the levels are far enough apart; of the same level, if the policy says so, or if that one is
    promised its turn. A job that was promised a TPOT
    is preempted so only for one that is due back (sage_sched.swap_out_bound)."""
    if running.level != waiting.level:
        return running.level - waiting.level > view.server.level_gap
    if running.is_promised or not (policy.preempts or waiting.is_promised):
        return False
    if waiting.is_promised:
        return waiting.is_due or running.hints.tpot_slo_ms is None
    return policy.should_preempt(running, waiting, price_s, view)


def may_displace(job: Job) -> bool:
    """Whether others may have to yield to this job. If it keeps its memory after its answer, they
    might never get theirs back."""
    return job.is_ranked and not job.keeps_memory


def plan_turns(
    running: Iterable[Job],
    candidates: Iterable[tuple[Job, int]],
    *,
    free_slots: int,
    free_tokens: int,
    prefill_tokens: int,
    policy: Policy,
    view: SchedulerView,
    most_yields: int,
    departure: Callable[[Job], Departure | None],
) -> list[Turn]:
    """The turns of the candidates, in their order, up to the first that cannot enter.

    A candidate enters if a slot is free, and more tokens than it needs. Of those that would yield
    to it (_would_yield) the worst do so first, and no more than needed. A job does not yield if it
    has yielded most_yields times, or would free nothing of what is short.

    A candidate that fills the pass (prefill_tokens) is the last. The engine leaves the next ones in
    its queue, and a swapped job behind them would pass them.

    running: the ranked running jobs. candidates: with the tokens that admission asks for each.
    departure: how a running job would leave; None if it has to stay. Costly: called only for jobs
        that would be preempted at price zero.
    """
    left = [
        (job.level, policy.key(job, view), job.arrival, job)
        for job in running
        if job.num_yields < most_yields
    ]
    left.sort(reverse=True)
    turns = []
    also_tokens = 0
    for newcomer, needed_tokens in candidates:
        if newcomer in view.swapped:  # or it would pass one for which the engine has no room
            needed_tokens += also_tokens
        place = (math.inf, math.inf)  # nobody yields to one that the policy cannot rank
        if newcomer.is_ranked:
            place = _place(newcomer, policy, view)
        willing = (
            Victim(job, leaving)
            for level, key, _, job in left
            if (level, key) > place
            and _would_yield(job, newcomer, 0.0, policy, view)
            and (leaving := departure(job)) is not None
            and _would_yield(job, newcomer, leaving.price_s, policy, view)
        )
        victims = _enough(willing, 1 - free_slots, needed_tokens + 1 - free_tokens)
        if victims is None:
            break
        free_slots += len(victims) - 1
        freed_tokens = sum(victim.departure.freed_tokens for victim in victims)
        free_tokens += freed_tokens - needed_tokens
        gone = {victim.job.arrival for victim in victims}
        left = [entry for entry in left if entry[2] not in gone]
        turns.append(Turn(newcomer, tuple(victims)))
        if newcomer in view.swapped:
            also_tokens = 0  # its turn has them now
        else:
            also_tokens += _also_reserved(newcomer, view)
            prefill_tokens -= view.uncached_tokens(newcomer)
            if prefill_tokens <= 0:
                break
    return turns


def _also_reserved(newcomer: Job, view: SchedulerView) -> int:
    """What SGLang's PrefillAdder._update_prefill_budget reserves for a prompt beyond what it asked
    for: whole pages, and the tokens of a begun answer twice."""
    begun_tokens = newcomer.generated_tokens
    uncached_tokens = newcomer.input_tokens + begun_tokens - newcomer.cached_tokens
    return begun_tokens + view.uncached_tokens(newcomer) - uncached_tokens


def _enough(willing: Iterator[Victim], short_slots: int, short_tokens: int) -> list[Victim] | None:
    """The first of the willing that together free what is short (0 or less: nothing is), without
    those that later ones make unnecessary; None if all together free too little."""
    chosen: list[Victim] = []
    while short_slots > 0 or short_tokens > 0:
        victim = next(willing, None)
        if victim is None:
            return None
        if short_slots > 0 or victim.departure.freed_tokens > 0:
            chosen.append(victim)
            short_slots -= 1
            short_tokens -= victim.departure.freed_tokens
    for victim in reversed(chosen[:-1]):  # the better keys stay
        freed_tokens = victim.departure.freed_tokens
        if short_slots < 0 and short_tokens + freed_tokens <= 0:
            chosen.remove(victim)
            short_slots += 1
            short_tokens += freed_tokens
    return chosen
