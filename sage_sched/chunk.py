"""Which jobs enter beside the next chunk of a chunked prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sage_sched.job import Job
from sage_sched.line import place_of
from sage_sched.plan import Budget
from sage_sched.policy import Policy
from sage_sched.preemption import may_displace
from sage_sched.view import SchedulerView


@dataclass(frozen=True, slots=True)
class Guests:
    """Waiting jobs that may enter during a pass.

    order: positions of SchedulerView.waiting: the guests first, then others.
    num_guests: how many of the order are guests.
    num_too_long: jobs that go before the chunked prompt but have to wait for its end: the engine
        chunks one prompt at a time, and theirs fits beside no chunk.
    """

    order: list[int]
    num_guests: int
    num_too_long: int = 0


def guests_beside(
    chunked: Job,
    order: Sequence[int],
    num_open: int,
    budget: Budget,
    policy: Policy,
    view: SchedulerView,
) -> Guests:
    """Of the first num_open of the order, the jobs that may enter beside the next chunk.

    These are jobs with KV in host memory, which need no prefill, and jobs that go before the
    chunked prompt, as long as all fit and leave it a page. Jobs to which nobody may yield wait.
    Nobody enters past a promised job.
    """
    most_tokens = left_tokens = pass_tokens(budget, view) - view.page_size
    guests: list[int] = []
    num_too_long = 0
    for position in order[:num_open]:
        job = view.waiting[position]
        num_tokens = 0 if job in view.swapped else view.uncached_tokens(job)
        if num_tokens and may_displace(job) and not _goes_before(job, chunked, policy, view):
            break
        if may_displace(job) and num_tokens <= left_tokens:
            left_tokens -= num_tokens
            guests.append(position)
        elif job.is_promised:
            break
        else:
            num_too_long += may_displace(job) and num_tokens > most_tokens
    chosen = set(guests)
    others = [position for position in order if position not in chosen]
    return Guests(guests + others, len(guests), num_too_long)


def shortened(budget: Budget, entering: Iterable[Job], view: SchedulerView) -> Budget:
    """The budget if these are prefilled beside a chunk, which is shorter by what they need."""
    reserved_tokens = sum(view.uncached_tokens(job) for job in entering)
    if not reserved_tokens:
        return budget
    chunk_tokens = max(view.page_size, pass_tokens(budget, view) - reserved_tokens)
    return replace(budget, chunk_tokens=min(chunk_tokens, budget.chunk_tokens or chunk_tokens))


def _goes_before(job: Job, chunked: Job, policy: Policy, view: SchedulerView) -> bool:
    """Whether a waiting ranked job goes before the chunked one; by arrival if that is unranked."""
    if chunked.is_ranked or chunked.is_promised:
        return place_of(job, policy, view) < place_of(chunked, policy, view)
    place = (job.level, not job.is_promised, job.arrival)
    return place < (chunked.level, True, chunked.arrival)


def pass_tokens(budget: Budget, view: SchedulerView) -> int:
    """The most that a pass prefills."""
    given_tokens = budget.prefill_tokens
    return view.pass_tokens if given_tokens is None else min(given_tokens, view.pass_tokens)
