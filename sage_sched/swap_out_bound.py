"""Bounds the time that a request is swapped out between two of its tokens."""

from __future__ import annotations

import math
from collections.abc import Collection

from sage_sched.job import Job
from sage_sched.view import SchedulerView

# A resumed job that has passed the bound stays on the device for this many tokens. 32 or 128 are as
# good. If it stayed to its end, mean TTLT would rise by 13 % (the README's traffic, bound of 60 s;
# simulated).
_STAY_TOKENS = 64


class SwapOutBound:
    """Bounds the time between two tokens of a swapped-out job.

    A job that has been swapped out for longer than most_s seconds has passed the bound
    (Job.passed_swap_out_bound). It goes before all others of its level, as if it had passed the
    starvation bound. Jobs that have passed neither bound are preempted for it, whatever that costs.
    After _STAY_TOKENS tokens it may be preempted again. It keeps waiting if a policy holds it back
    (Policy.key), or if the jobs that may be preempted hold too little memory.

    next_s: when the next job will pass the bound, or its time has to be measured.
    """

    def __init__(self, most_s: float = math.inf) -> None:
        self._most_s = most_s
        self.next_s = math.inf
        # When each swapped-out job was first seen with the clock running. None on its first pass:
        # the clock may have stood still until then (needs_clock).
        self._since_s: dict[Job, float | None] = {}
        # For jobs that have passed the bound, the age at which they may be preempted again.
        self._stays_until: dict[Job, int] = {}

    def is_like(self, other: SwapOutBound) -> bool:
        """Whether the other bounds the same time."""
        return self._most_s == other._most_s

    @property
    def needs_clock(self) -> bool:
        """Whether any job is swapped out, so that its time must be measured."""
        return bool(self._since_s)

    def check(self, view: SchedulerView, begun: Collection[Job]) -> None:
        """Find the jobs that have passed the bound, before the jobs are ordered.

        begun: waiting jobs that have generated tokens.
        """
        if self._most_s == math.inf:
            return
        since_s = {job: view.now_s if job in self._since_s else None for job in begun}
        self._since_s = {job: self._since_s.get(job) or now_s for job, now_s in since_s.items()}
        for job, left_s in self._since_s.items():
            if left_s is not None and view.now_s - left_s > self._most_s and not job.goes_first:
                self._stays_until[job] = job.generated_tokens + _STAY_TOKENS
                job.pass_swap_out_bound(True)
        self.next_s = min(
            (
                view.now_s if left_s is None else left_s + self._most_s
                for job, left_s in self._since_s.items()
                if not job.goes_first
            ),
            default=math.inf,
        )
        if self._stays_until:
            present = {*begun, *view.running, *view.chunked_jobs}
            ended = {job for job, age in self._stays_until.items() if job.generated_tokens >= age}
            for job in [job for job in self._stays_until if job in ended or job not in present]:
                del self._stays_until[job]
                job.pass_swap_out_bound(False)
