"""Defines a limit, a rule that holds under every policy."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.view import SchedulerView


class Limit:
    """Receives the events of a server, and may bound its passes. By default it does nothing. Only
    methods that a limit overrides are called, and none but `concerns` until it is engaged.

    is_engaged: whether a job has come that concerns it.
    next_s: when it wants another plan of a batch that no waiting job can enter, by
        SchedulerView.now_s.
    next_tokens: when it wants another plan of a full batch, by SchedulerView.served_tokens.
    room: how many more jobs may be swapped out for jobs that have passed no bound.
    """

    is_engaged: bool = True
    next_s: float = math.inf
    next_tokens: float = math.inf
    room: float = math.inf

    def is_like(self, other: Limit) -> bool:
        """Whether the other one, with all that it has learned, may take its place."""
        return False

    def concerns(self, job: Job) -> bool:
        """Whether this job engages it."""
        return True

    def arrived(self, job: Job) -> None:
        """Note that a job has arrived, or is here as this limit begins to hold."""

    def queued(self, jobs: Iterable[Job]) -> None:
        """Note that these jobs begin to wait: they are new, or have run."""

    def dequeued(self, jobs: Iterable[Job]) -> None:
        """Note that these jobs no longer wait."""

    def ended(self, job: Job, now_s: float) -> None:
        """Note that a job has ended, was aborted, or was refused."""

    def prefilled(self, num_requests: int, num_tokens: int, num_pairs: float) -> None:
        """Note a prefill step that produces no decode tokens; see StepTime."""

    def decoded(self) -> None:
        """Note a step that produces decode tokens."""

    def look(self, view: SchedulerView, begun: Collection[Job]) -> None:
        """Note that a pass is about to order the jobs. begun: waiting jobs that have generated
        tokens."""

    def within(self, budget: Budget, view: SchedulerView) -> Budget:
        """Return the budget of a pass that may prefill, cut to what this limit allows."""
        return budget
