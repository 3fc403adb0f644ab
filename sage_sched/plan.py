"""Who yields to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from sage_sched.job import Job
from sage_sched.policy import Policy

# How many waiting jobs a plan looks at.
PLAN_WINDOW = 16


class Departure(NamedTuple):
    """What it takes to let a running job go, and what that gives back.

    price_s: seconds of the server that its way out and back takes.
    freed_tokens: tokens that admission gets back: the KV that nobody else holds, and what is set
    aside for the rest of its answer.
    """

    price_s: float
    freed_tokens: int


class _Victim(NamedTuple):
    """A running job that is willing to yield."""

    job: Job
    freed_tokens: int


@dataclass(frozen=True, slots=True)
class Claimant:
    """A waiting job that the policy admitted, and how many tokens admission asks for it."""

    job: Job
    needed_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A waiting job that gets in, and the running jobs that yield for it (none: there is room)."""

    newcomer: Job
    yielding: tuple[Job, ...]


def plan_turns(
    running: Iterable[Job],
    waiting: Sequence[Claimant],
    *,
    free_slots: int,
    free_tokens: int,
    policy: Policy,
    served_tokens: int,
    max_yields: int,
    departure: Callable[[Job], Departure | None],
) -> list[Turn]:
    """The turns of the waiting jobs, in their order, up to the first that cannot get in.

    running: the running jobs that the policy admitted.
    departure: what a running job's leaving takes and gives; None if it has to stay. It is asked
    only about jobs that the policy would let go for nothing, as the answer takes time to find.

    A claimant gets in with a slot free and more tokens free than it needs. Only jobs of a worse key
    for which `policy.yields` holds yield to it, the worst first and no more than needed; not one
    that has yielded max_yields times, nor one that would free nothing of what is short.
    """
    left = [
        (policy.key(job, served_tokens), job.arrival, job)
        for job in running
        if job.num_yields < max_yields
    ]
    left.sort(reverse=True)
    turns = []
    for claimant in waiting:
        key = policy.key(claimant.job, served_tokens)
        willing = (
            _Victim(job, leaving.freed_tokens)
            for _, _, job in takewhile(partial(_is_behind, key), left)
            if policy.yields(job, claimant.job, served_tokens, 0.0)
            and (leaving := departure(job)) is not None
            and policy.yields(job, claimant.job, served_tokens, leaving.price_s)
        )
        short_tokens = claimant.needed_tokens + 1 - free_tokens
        yielding = _enough(willing, 1 - free_slots, short_tokens)
        if yielding is None:
            break
        free_slots += len(yielding) - 1
        free_tokens += sum(victim.freed_tokens for victim in yielding) - claimant.needed_tokens
        gone = {victim.job.arrival for victim in yielding}
        left = [entry for entry in left if entry[1] not in gone]
        turns.append(Turn(claimant.job, tuple(victim.job for victim in yielding)))
    return turns


def _is_behind(key: float, entry: tuple[float, int, Job]) -> bool:
    return entry[0] > key


def _enough(
    willing: Iterator[_Victim], short_slots: int, short_tokens: int
) -> list[_Victim] | None:
    """The first of the willing that together free what is short (nothing where that is 0 or
    less), without those that the later ones make superfluous; None where all do not suffice."""
    chosen: list[_Victim] = []
    while short_slots > 0 or short_tokens > 0:
        victim = next(willing, None)
        if victim is None:
            return None
        if short_slots > 0 or victim.freed_tokens > 0:
            chosen.append(victim)
            short_slots -= 1
            short_tokens -= victim.freed_tokens
    for victim in reversed(chosen[:-1]):  # the better keys stay
        if short_slots < 0 and short_tokens + victim.freed_tokens <= 0:
            chosen.remove(victim)
            short_slots += 1
            short_tokens += victim.freed_tokens
    return chosen
