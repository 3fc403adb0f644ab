"""Narrows down the waiting jobs that a pass may admit, in the steps of sage_sched.scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.policy import Policy
from sage_sched.shared_prefix import shared_prefix_followers
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import place_of

# A plan may preempt others for this many waiting jobs, the first of the order.
WINDOW = 16


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

    def window(self, view: SchedulerView) -> list[Job]:
        """Return the jobs for which others may be preempted."""
        positions = self.order[: min(self.num_first, WINDOW)]
        return [view.waiting[position] for position in positions]

    def without_held_back(self, policy: Policy, view: SchedulerView) -> Self:
        """Put the jobs that the policy holds back (Policy.key) last. If there is no other job, all
        may be admitted: a server must not stand still."""

        def is_held_back(position: int) -> bool:
            job = view.waiting[position]
            return job.is_ranked and policy.key(job, view) == math.inf

        last_ranked = next((p for p in reversed(self.order) if view.waiting[p].is_ranked), None)
        if last_ranked is None or not is_held_back(last_ranked):
            return self
        held_back = [position for position in self.order if is_held_back(position)]
        if len(held_back) == len(self.order) and not view.running and view.chunked is None:
            return self
        return self._last(held_back)

    def without_followers(self, view: SchedulerView) -> Self:
        """Put jobs that wait for another job's prefix (sage_sched.shared_prefix) last."""
        followers = shared_prefix_followers(self.order[: self.num_open], view)
        return replace(self._last(followers), has_followers=True) if followers else self

    def _last(self, positions: Sequence[int]) -> Self:
        """Put these jobs, which are open, behind the other open jobs. They may not be admitted."""
        last = set(positions)
        others = [position for position in self.order[: self.num_open] if position not in last]
        order = [*others, *positions, *self.order[self.num_open :]]
        return replace(self, order=order, num_open=len(others), num_first=len(others))

    def beside_chunk(
        self, chunked: Job | None, budget: Budget, policy: Policy, view: SchedulerView
    ) -> Self:
        """While a prompt is being chunked, put the jobs that are piggybacked on its next chunk
        first.

        These are jobs with KV in host memory, which need no prefill, and jobs that go before the
        chunked prompt, if all fit and leave it a page. Jobs that may preempt no other job wait. No
        job overtakes a job that goes first.
        """
        if chunked is None:
            return self
        most_tokens = left_tokens = view.pass_limit(budget) - view.page_size
        chosen: list[int] = []
        num_too_long = 0
        for position in self.order[: self.num_open]:
            job = view.waiting[position]
            may_preempt = job.may_preempt_others
            num_tokens = 0 if job in view.swapped else view.uncached_tokens(job)
            if num_tokens and may_preempt and not _goes_before(job, chunked, policy, view):
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


def _goes_before(job: Job, chunked: Job, policy: Policy, view: SchedulerView) -> bool:
    """Whether a waiting ranked job goes before the chunked job, or arrived before it if the chunked
    job is unranked."""
    if chunked.is_ranked or chunked.goes_first:
        return place_of(job, policy, view) < place_of(chunked, policy, view)
    place = (job.level, not job.goes_first, job.arrival)
    return place < (chunked.level, True, chunked.arrival)
