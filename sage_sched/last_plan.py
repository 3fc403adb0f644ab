"""Tells whether the last plan of a batch still stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from sage_sched.job import Job
from sage_sched.plan import Lacking, NextPlan, Plan
from sage_sched.view import SchedulerView

# If more jobs come at once, a plan looks at them.
_MOST_NEW = 64


class LastPlan:
    """The last plan of a server. It stands while the batch is full and nothing in it may have
    changed.

    num_arrivals: the number of arrivals for which it stands; -1: another plan is due.
    next: when another plan is due, if no further job comes.
    level: the level of all jobs, if the plan found that none can enter a full batch.
    """

    def __init__(self) -> None:
        self.num_arrivals = -1
        self.next = NextPlan()
        self.level: int | None = None
        # The jobs that have come since it was made.
        self._new: list[Job] = []
        self._lacking: Lacking | None = None
        self._locked_tokens = 0

    def expire(self) -> None:
        """Make another plan at the next pass, even if nothing changes."""
        self.num_arrivals = -1
        self._new.clear()
        self._lacking = None

    def came(self, job: Job) -> None:
        """Note that a job has come."""
        if self.num_arrivals < 0:
            return
        self._new.append(job)
        if len(self._new) > _MOST_NEW:
            self.expire()

    def joins(self, job: Job) -> None:
        """Note that a job joins the engine's queue. If it came before the last check, it may be the
        first of the order: it has run, or its grammar has just been compiled."""
        if job not in self._new:
            self.expire()

    def reordered(self) -> None:
        """Note that another job may be the first of the order."""
        self._lacking = None

    def ended(self, job: Job, freed_tokens: int) -> None:
        """Note that a job has ended. If it was running, at most this many tokens were kept free
        for it."""
        if self._lacking is None:
            return
        first, needed_tokens, num_ends = self._lacking
        is_known = first is not job and num_ends > 0
        self._lacking = (
            Lacking(first, needed_tokens - freed_tokens, num_ends - 1) if is_known else None
        )

    def note_new(self, now_s: float, enters_at_s: Callable[[Job], float]) -> None:
        """Note when the new jobs may enter a full batch (Policy.enters_full_at_s), and so need
        another plan."""
        for job in self._new:
            at_s = enters_at_s(job)
            if at_s > now_s:
                self.num_arrivals += 1
                # It passes its starvation bound no sooner (sage_sched.starvation_bound).
                bound_tokens = job.served_at_arrival_tokens + self._locked_tokens
                at_tokens = min(self.next.at_tokens, bound_tokens)
                self.next = self.next._replace(at_s=min(self.next.at_s, at_s), at_tokens=at_tokens)
            if not now_s < at_s < math.inf:
                self.reordered()
        self._new.clear()

    def unseen(self) -> None:
        """Make another plan for the new jobs, because the engine does not show all of them yet."""
        if self._new:
            self.expire()

    def first_lacks_memory(self, room_tokens: int) -> bool:
        """Whether the first job of the order still lacks memory, although others have ended. Until
        it has enough, the batch is full.

        room_tokens: see SchedulerView.
        """
        return self._lacking is not None and room_tokens < self._lacking.needed_tokens

    def has_changed(
        self,
        num_arrivals: int,
        now_s: float,
        served_tokens: int,
        ages: Iterable[int],
        most_tokens: int,
    ) -> bool:
        """Whether another plan is due, by new jobs, the time, the work done, or the index of a
        running job (Scheduler.may_have_changed)."""
        at_s, at_tokens, interval = self.next
        if num_arrivals != self.num_arrivals or now_s >= at_s:
            return True
        if not interval:
            return served_tokens > at_tokens
        return any(age % interval < most_tokens for age in ages)

    def begins(self) -> None:
        """Note that a plan is about to be made."""
        self._new.clear()
        self.level = None

    def made(self, plan: Plan, view: SchedulerView) -> None:
        """Note the plan. If it has not looked at the memory of the job that lacked it, the job
        still does."""
        if plan.is_new:
            self.num_arrivals = view.num_arrivals
        self._locked_tokens = view.locked_tokens
        first = view.waiting[plan.order[0]] if plan.order and not plan.actions else None
        if plan.lacking is not None or self._lacking is None or self._lacking.job is not first:
            self._lacking = plan.lacking
