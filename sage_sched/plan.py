"""Who yields to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from sage_sched.job import Job
from sage_sched.policy import Policy

# How many waiting jobs a plan looks at.
PLAN_WINDOW = 16


class Holder(NamedTuple):
    """A running job that the policy admitted.

    freed_tokens: what its yielding gives back to admission: the KV that it holds and what is set
    aside for the rest of its answer.
    """

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
    running: Sequence[Holder],
    waiting: Sequence[Claimant],
    *,
    free_slots: int,
    free_tokens: int,
    policy: Policy,
    served_tokens: int,
    max_yields: int,
    move_s: Callable[[Job], float | None],
) -> list[Turn]:
    """The turns of the waiting jobs, in their order, up to the first that cannot get in.

    move_s: seconds of the server that a running job's way out and back takes; None where it has to
    stay. Asked of those alone that the policy would let go for nothing.

    A claimant gets in with a slot free and more tokens free than it needs. Only jobs of a worse key
    for which `policy.yields` holds yield to it, the worst first and no more than needed; not one
    that has yielded max_yields times, nor one that would free nothing of what is short.
    """
    keyed = [
        (policy.key(holder.job, served_tokens), holder.job.arrival, holder)
        for holder in running
        if holder.job.num_yields < max_yields
    ]
    keyed.sort(reverse=True)
    left = [(key, holder) for key, _, holder in keyed]
    turns = []
    for claimant in waiting:
        key = policy.key(claimant.job, served_tokens)
        willing = (
            holder
            for _, holder in takewhile(partial(_is_behind, key), left)
            if policy.yields(holder.job, claimant.job, served_tokens, 0.0)
            and (price_s := move_s(holder.job)) is not None
            and policy.yields(holder.job, claimant.job, served_tokens, price_s)
        )
        short_tokens = claimant.needed_tokens + 1 - free_tokens
        yielding = _enough(willing, 1 - free_slots, short_tokens)
        if yielding is None:
            break
        free_slots += len(yielding) - 1
        free_tokens += sum(holder.freed_tokens for holder in yielding) - claimant.needed_tokens
        left = [entry for entry in left if entry[1] not in yielding]
        turns.append(Turn(claimant.job, tuple(holder.job for holder in yielding)))
    return turns


def _is_behind(key: float, entry: tuple[float, Holder]) -> bool:
    return entry[0] > key


def _enough(willing: Iterator[Holder], short_slots: int, short_tokens: int) -> list[Holder] | None:
    """The first of the willing that together free what is short (nothing where that is 0 or
    less), without those that the later ones make superfluous; None where all do not suffice."""
    chosen: list[Holder] = []
    while short_slots > 0 or short_tokens > 0:
        holder = next(willing, None)
        if holder is None:
            return None
        if short_slots > 0 or holder.freed_tokens > 0:
            chosen.append(holder)
            short_slots -= 1
            short_tokens -= holder.freed_tokens
    for holder in reversed(chosen[:-1]):  # the better keys stay
        if short_slots < 0 and short_tokens + holder.freed_tokens <= 0:
            chosen.remove(holder)
            short_slots += 1
            short_tokens += holder.freed_tokens
    return chosen
