"""Narrows down the waiting jobs that a pass may admit, in the steps of sage_sched.scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import place_of

# This many jobs at the head of the order are compared with each other for shared prefixes. The jobs
# behind them are compared only with the jobs for which others wait.
_NUM_COMPARED = 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """Waiting jobs in order, by their positions in SchedulerView.waiting.

    order: first the jobs that may be admitted, then the others.
    num_open: how many jobs of the order the engine may admit if it finds room.
    num_first: how many of these the plan itself considers: while a prompt is chunked, only the
        piggybacked jobs.
    num_too_long: how many jobs go before the chunked prompt but have to wait for its end, because
        the engine chunks one prompt at a time and their prompts are too long to fit beside a chunk.
    has_followers: whether a job waits for another job's prefix.
    """

    order: list[int]
    num_open: int
    num_first: int
    num_too_long: int = 0
    has_followers: bool = False

    @classmethod
    def of(
        cls,
        order: list[int],
        chunked: Job | None,
        pass_tokens: int,
        policy: Policy,
        view: SchedulerView,
    ) -> Self:
        """Narrow down the waiting jobs in this order.

        chunked: the prompt whose next chunk the pass prefills. pass_tokens: the most that the pass
            prefills.
        """
        found = cls(order, len(order), len(order))
        found = found._without_held_back(policy, view)._without_followers(view)
        return found if chunked is None else found._beside(chunked, pass_tokens, policy, view)

    def _without_held_back(self, policy: Policy, view: SchedulerView) -> Self:
        """Put the jobs that the policy holds back (Policy.key) last. If there is no other job, all
        may be admitted: a server must not stand still."""

        def is_held_back(position: int) -> bool:
            job = view.waiting[position]
            has_key = not job.passed_starvation_bound  # its policy may have failed to rank it
            return job.is_held or (has_key and policy.key(job, view) == math.inf)

        if not self.order or not is_held_back(self.order[-1]):
            return self
        held_back = [position for position in self.order if is_held_back(position)]
        if len(held_back) == len(self.order) and not view.running and view.chunked is None:
            return self
        return self._last(held_back)

    def _without_followers(self, view: SchedulerView) -> Self:
        """Put jobs that wait for another job's prefix last (shared_prefix_followers)."""
        followers = shared_prefix_followers(self.order[: self.num_open], view)
        return replace(self._last(followers), has_followers=True) if followers else self

    def _last(self, positions: Sequence[int]) -> Self:
        """Put these jobs, which are open, behind the other open jobs. They may not be admitted."""
        last = set(positions)
        others = [position for position in self.order[: self.num_open] if position not in last]
        order = [*others, *positions, *self.order[self.num_open :]]
        return replace(self, order=order, num_open=len(others), num_first=len(others))

    def _beside(self, chunked: Job, pass_tokens: int, policy: Policy, view: SchedulerView) -> Self:
        """Put the jobs that are piggybacked on the next chunk of a prompt first.

        These are jobs with KV in host memory, which need no prefill, and jobs that go before the
        chunked prompt, if all fit and leave it a page. Jobs that may preempt no other job wait. No
        job overtakes a job that goes first.
        """
        behind = place_of(chunked, policy, view)
        most_tokens = left_tokens = pass_tokens - view.page_size
        chosen: list[int] = []
        num_too_long = 0
        for position in self.order[: self.num_open]:
            job = view.waiting[position]
            may_preempt = not job.keeps_memory
            num_tokens = 0 if job in view.swapped else view.uncached_tokens(job)
            if num_tokens and may_preempt and place_of(job, policy, view) >= behind:
                break
            if may_preempt and num_tokens <= left_tokens:
                left_tokens -= num_tokens
                chosen.append(position)
            elif job.goes_first:
                break
            else:
                num_too_long += may_preempt and num_tokens > most_tokens
        first = set(chosen)
        others = [position for position in self.order if position not in first]
        return replace(
            self, order=chosen + others, num_first=len(chosen), num_too_long=num_too_long
        )

    def num_before_swapped(self, view: SchedulerView) -> int:
        """Return how many jobs may be admitted if swapped jobs are passed over. Jobs behind a
        swapped job that goes first may not be admitted."""
        for number, position in enumerate(self.order[: self.num_open]):
            job = view.waiting[position]
            if not job.goes_first:
                break
            if job in view.swapped:
                return number
        return self.num_open


def shared_prefix_followers(order: Sequence[int], view: SchedulerView) -> list[int]:
    """Return the positions of waiting jobs that should wait for one more pass.

    Another job computes the beginning of their prompt first, and computing it twice would take
    longer than one more prefill step. That job is chunked, comes earlier in the order, or runs and
    has no token yet. (Under overlap SGLang plans a pass before the KV of the previous pass is in
    the radix tree.) A job that goes first never waits.
    """
    computing = [job for job in view.running if not job.generated_tokens]
    if view.chunked is not None:
        computing.append(view.chunked)
    waits: list[int] = []
    leaders: dict[Job, None] = {}
    for number, position in enumerate(order):
        if number == _NUM_COMPARED:
            if not leaders:
                break
            computing = [*leaders]
        job = view.waiting[position]
        if job in view.swapped or job.keeps_memory or not _is_long(job.input_tokens, job, view):
            continue
        leader = None if job.goes_first else _leader(job, computing, view)
        if leader is not None:
            waits.append(position)
            leaders[leader] = None
        elif number < _NUM_COMPARED:
            computing.append(job)
    return waits


def _leader(job: Job, computing: Iterable[Job], view: SchedulerView) -> Job | None:
    """Return the first of the jobs being computed with which the job shares a long prefix, if any.
    The last token of a prompt is always computed."""
    for other in computing:
        num_tokens = min(view.kv.common_tokens(job, other), job.input_tokens - 1)
        if num_tokens and _is_long(num_tokens, other, view) and _is_long(num_tokens, job, view):
            return other
    return None


def _is_long(num_tokens: int, job: Job, view: SchedulerView) -> bool:
    """Whether the uncached part of these tokens takes longer than the fixed time of a prefill
    step."""
    new_tokens = num_tokens - max(job.cached_tokens, job.prefilled_tokens)
    step_time = view.server.step_time
    return new_tokens * step_time.prefill_token_s > step_time.prefill_base_s


def may_enter_full(waiting: Iterable[Job], policy: Policy, view: SchedulerView) -> bool:
    """Whether any of these waiting jobs might enter a full batch, now or when running jobs are
    older. If not, running jobs need not be weighed."""
    if policy.can_preempt and not policy.traits.preempts_for_starts:
        return any(True for _ in waiting)
    levels = {job.level for job in view.running}
    return any(job.goes_first or job.starts_now or levels != {job.level} for job in waiting)
