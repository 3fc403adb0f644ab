"""Decides which running jobs are preempted, for waiting jobs or because memory runs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from sage_sched.candidates import may_enter_full
from sage_sched.headroom import Headroom
from sage_sched.job import BEHIND, Entry, Job
from sage_sched.plan import UNLIMITED, Preempt, PreemptionMode
from sage_sched.policy import Policy
from sage_sched.view import Holding, SchedulerView
from sage_sched.waiting_queue import place_of

_MEMORY_RUNS_OUT = "memory runs out, and it is the last of the order"


class PreemptionCost(NamedTuple):
    """The cost and the gain of preempting a running job.

    mode: where its KV stays.
    price_s: seconds that the server takes to move it out and back.
    freed_tokens: KV that no other job holds, plus the KV set aside for the job's next steps.
    host_tokens: KV that goes to host memory.
    """

    mode: PreemptionMode
    price_s: float
    freed_tokens: int
    host_tokens: int = 0


class Victim(NamedTuple):
    """A running job that is preempted."""

    job: Job
    cost: PreemptionCost


def preemption_cost_of(
    holding: Holding,
    aside_tokens: int,
    host_free_tokens: int,
    view: SchedulerView,
    *,
    is_last_resort: bool = False,
) -> PreemptionCost | None:
    """Return the cost of preempting a job with this holding; None if its KV would have to be
    recomputed and must not be.

    All of its KV goes to host memory if there is room. It is recomputed only as a last resort,
    because recomputed KV is rounded differently, which may change sampled text.

    is_last_resort: memory runs out. The engine itself would recompute the KV, so the plan may too.
    """
    freed_tokens = holding.freed_tokens + aside_tokens
    if holding.kv_tokens <= host_free_tokens:
        swap_s = view.server.swap_s(holding.kv_tokens)
        return PreemptionCost(PreemptionMode.SWAP, swap_s, freed_tokens, holding.kv_tokens)
    if holding.stays_whole or not is_last_resort:
        return None
    recompute_s = view.server.recompute_s(holding.kv_tokens, holding.cached_tokens)
    return PreemptionCost(PreemptionMode.RECOMPUTE, recompute_s, freed_tokens)


def any_is_preemptible(first: Job, policy: Policy, view: SchedulerView) -> bool:
    """Whether any running job could be preempted for the first waiting one, at price zero. In most
    passes there is none, and no plan is needed."""
    if first.keeps_memory:
        return False
    place = place_of(first, policy, view)[:2]
    return any(
        _is_preemptible(job, first, 0.0, policy, view)
        for job in view.running
        if place_of(job, policy, view)[:2] > place
    )


def _is_preemptible(
    running: Job, waiting: Job, price_s: float, policy: Policy, view: SchedulerView
) -> bool:
    """Whether a running job is preempted, at this price, for a waiting job that goes before it.

    price_s: seconds to move the running job's KV to host memory and back.

    If the waiting job's level is better by more than ServerFacts.level_gap, or the running job's
    batch is behind, the running job is preempted at any price. Within a level the policy decides,
    unless the waiting job goes first: then the price does not count. A job with a TPOT target is
    preempted for a job past the swap-out bound, but for no other that goes first. A pinned job is
    never preempted.
    """
    if running.is_pinned:
        return False
    if running.level != waiting.level:
        return running.level - waiting.level > min(view.server.level_gap, BEHIND // 2)
    if running.goes_first or not (policy.can_preempt or waiting.goes_first):
        return False
    if waiting.goes_first:
        return waiting.passed_swap_out_bound or running.hints.tpot_slo_ms is None
    return policy.should_preempt(running, waiting, price_s, view)


class Preemptible:
    """Finds the running jobs that are preempted for the jobs that a pass admits.

    without_host_room: jobs that would have been preempted if host memory had room for their KV.
    """

    def __init__(
        self, policy: Policy, view: SchedulerView, aside_tokens: Sequence[int], room: float
    ) -> None:
        """aside_tokens: the KV set aside for each running job. room: see SwapOutBound."""
        self._policy, self._view, self._room = policy, view, room
        self._aside_of = dict(zip(view.running, aside_tokens, strict=True))
        self._gone = set[Job]()
        self.without_host_room = set[Job]()

    def enough(self, newcomer: Job, short_slots: int, short_tokens: int) -> list[Victim]:
        """Preempt jobs for a waiting job until enough is free; none if all together free too
        little.

        Of the jobs that may be preempted (_is_preemptible), the last in the order are chosen first.
        A job is left out if later ones free enough without it.

        short_slots, short_tokens: how many are missing; 0 or less if none.
        """
        chosen: list[Victim] = []
        each = self._each(newcomer)
        while short_slots > 0 or short_tokens > 0:
            victim = next(each, None)
            if victim is None:
                return []
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
        self._gone.update(victim.job for victim in chosen)
        self._room -= len(chosen)
        return chosen

    def _each(self, newcomer: Job) -> Iterator[Victim]:
        """Yield the jobs that may be preempted for a waiting job, from the last in the order.
        Computing a cost is slow, so it is done only for jobs that would be preempted at price
        zero."""
        policy, view = self._policy, self._view
        if not may_enter_full([newcomer], policy, view):
            return
        if self._room <= 0 and not newcomer.goes_first:
            return
        place = place_of(newcomer, policy, view)[:2]
        for level, key, _, job in self._last_first:
            if (level, key) <= place:
                return
            if (
                job not in self._gone
                and _is_preemptible(job, newcomer, 0.0, policy, view)
                and (cost := self._cost_of(job)) is not None
                and _is_preemptible(job, newcomer, cost.price_s, policy, view)
            ):
                yield Victim(job, cost)

    @cached_property
    def _last_first(self) -> list[Entry]:
        most = self._policy.traits.max_preemptions
        may_leave = (job for job in self._view.running if job.num_preemptions < most)
        places = ((*place_of(job, self._policy, self._view), job) for job in may_leave)
        return sorted(places, reverse=True)

    def _cost_of(self, job: Job) -> PreemptionCost | None:
        """Return the cost of preempting a running job; None if host memory has no room for its KV,
        or the engine pins it."""
        view = self._view
        if (holding := view.kv.holding(job)) is None:
            return None
        cost = preemption_cost_of(holding, self._aside_of[job], view.host_free_tokens, view)
        if cost is None:
            self.without_host_room.add(job)
        return cost


def retention_order(jobs: Sequence[Job], policy: Policy, view: SchedulerView) -> list[int]:
    """Return the positions of running jobs, from the first to keep to the first to retract. Pinned
    jobs (Job.is_pinned) come before all others."""
    places = [(not job.is_pinned, place_of(job, policy, view)) for job in jobs]
    return sorted(range(len(jobs)), key=places.__getitem__)


def lacks_memory(view: SchedulerView) -> bool:
    """Whether memory runs out at the next step, which may include the next chunk."""
    chunk_tokens = 0
    if (job := view.chunked) is not None:
        left_tokens = job.input_tokens + job.generated_tokens - job.prefilled_tokens
        chunk_tokens = UNLIMITED.next_chunk_tokens(left_tokens, view.pass_tokens, view.page_size)
    return view.step_tokens + chunk_tokens > view.room_tokens


def preempt_for_memory(view: SchedulerView, policy: Policy, headroom: Headroom) -> list[Preempt]:
    """Return the jobs to preempt if memory runs out: from the end of the order, until the others
    have their headroom. The first job of the order, or a prompt that is being chunked, goes on.

    Only the place in the order counts. Picking the jobs with the most or the least KV from the last
    quarter of the order was no better (H800 preset, four loads: mean TTLT within 1 %).
    """
    needed_tokens = headroom.next_steps_tokens(view.running)
    short_tokens = sum(needed_tokens) - view.room_tokens
    order = retention_order(view.running, policy, view)
    if view.chunked is None:
        order = order[1:]
    else:
        short_tokens += headroom.needed_tokens(view.chunked) - view.chunked.prefilled_tokens
    host_free_tokens = view.host_free_tokens
    preempted: list[Preempt] = []
    for position in reversed(order):
        if short_tokens <= 0:
            break
        job = view.running[position]
        if job.is_pinned:
            break  # they are the first of the order
        holding = view.kv.holding(job)
        if holding is None or not holding.freed_tokens:
            continue
        aside_tokens = needed_tokens[position]
        cost = preemption_cost_of(
            holding, aside_tokens, host_free_tokens, view, is_last_resort=True
        )
        if cost is None:
            continue
        host_free_tokens -= cost.host_tokens
        short_tokens -= cost.freed_tokens
        preempted.append(Preempt(job, cost.mode, _MEMORY_RUNS_OUT))
    return preempted
