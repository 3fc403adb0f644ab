"""Which running jobs yield to which waiting ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from sage_sched.departure import Departure, Victim
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView

# How many waiting jobs a plan looks at.
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting job, and how many tokens admission asks for it."""

    job: Job
    needed_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A waiting job that enters, and the running ones that yield for it (none: there is room)."""

    newcomer: Job
    victims: tuple[Victim, ...] = ()


def anyone_would_yield(first: Job, policy: Policy, view: SchedulerView) -> bool:
    """Whether a running job would yield to the first of the waiting at price zero. In most passes
    none would, and the rest of the work is spared."""
    if not may_displace(first):
        return False
    key = policy.key(first, view)
    return any(
        policy.key(job, view) > key and policy.should_preempt(job, first, 0.0, view)
        for job in view.running
        if job.is_ranked and not job.is_promised
    )


def may_displace(job: Job) -> bool:
    """Whether others may have to yield to it. If it keeps its memory after its answer, they might
    never get theirs back."""
    return job.is_ranked and not job.keeps_memory


def plan_turns(
    running: Iterable[Job],
    candidates: Sequence[Candidate],
    *,
    free_slots: int,
    free_tokens: int,
    policy: Policy,
    view: SchedulerView,
    most_yields: int,
    departure: Callable[[Job], Departure | None],
) -> list[Turn]:
    """The turns of the candidates, in their order, up to the first that cannot enter.

    running: the ranked running jobs.
    departure: how a running job would leave; None if it has to stay. Costly: called only for jobs
    that would be preempted at price zero.

    A candidate enters if a slot is free and more tokens than it needs. Jobs of a worse key yield to
    it if `policy.should_preempt` holds, the worst first and no more than needed. A job does not
    yield if it is promised its turn, has yielded most_yields times, or would free nothing of what
    is short.
    """
    left = [
        (policy.key(job, view), job.arrival, job)
        for job in running
        if job.num_yields < most_yields and not job.is_promised
    ]
    left.sort(reverse=True)
    turns = []
    for candidate in candidates:
        # Nobody yields to one that the policy cannot rank.
        key = policy.key(candidate.job, view) if candidate.job.is_ranked else math.inf
        willing = (
            Victim(job, leaving)
            for _, _, job in takewhile(partial(_is_behind, key), left)
            if policy.should_preempt(job, candidate.job, 0.0, view)
            and (leaving := departure(job)) is not None
            and policy.should_preempt(job, candidate.job, leaving.price_s, view)
        )
        short_tokens = candidate.needed_tokens + 1 - free_tokens
        victims = _enough(willing, 1 - free_slots, short_tokens)
        if victims is None:
            break
        free_slots += len(victims) - 1
        freed_tokens = sum(victim.departure.freed_tokens for victim in victims)
        free_tokens += freed_tokens - candidate.needed_tokens
        gone = {victim.job.arrival for victim in victims}
        left = [entry for entry in left if entry[1] not in gone]
        turns.append(Turn(candidate.job, tuple(victims)))
    return turns


def _is_behind(key: float, entry: tuple[float, int, Job]) -> bool:
    return entry[0] > key


def _enough(willing: Iterator[Victim], short_slots: int, short_tokens: int) -> list[Victim] | None:
    """The first of the willing that together free what is short (0 or less: nothing is), without
    those that later ones make superfluous; None if all together do not suffice."""
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
