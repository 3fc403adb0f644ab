"""Predicts the wait of a newcomer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sage_sched.distribution import Floats
from sage_sched.overload.pace import Pace, Work

# With 1, the first requests of a flood are admitted and then overtaken by many: of 30/s where 4/s
# fit, 0.92 are good instead of 0.95. With 4, fewer are admitted, and hardly more of them are good.
MOST_PERIODS = 2.0


@dataclass(frozen=True, slots=True)
class Repeated:
    """Work that the latest arrivals brought, and that the next ones are expected to bring again.

    Each period of the past until now gives a rate. A rate is extrapolated to MOST_PERIODS times its
    period, and no further: a burst is no rate. So the period with the largest prediction counts.
    After a quiet time, periods that begin with the rush give its rate.

    work_s: the work of the arrivals in each period. span_s: the periods' lengths, all above 0. Both
        have shape (periods,).
    """

    work_s: Floats
    span_s: Floats

    def within(self, seconds: float, most_periods: float = MOST_PERIODS) -> float:
        """Return the work that arrives within this time."""
        shares = np.minimum(seconds / self.span_s, most_periods)
        return float(np.maximum.reduce(self.work_s * shares, initial=0.0))

    def delayed_s(self, seconds: float) -> float:
        """Return how long this much work takes if what arrives meanwhile goes first."""
        if not seconds or not self.work_s.size:
            return seconds
        # For each period it is the solution of t = seconds + work * min(MOST_PERIODS, t / span).
        # These functions of t are concave, so the largest solution solves their maximum.
        rest = np.maximum(1.0 - self.work_s / self.span_s, 1e-9)
        delayed_s = np.minimum(seconds / rest, seconds + MOST_PERIODS * self.work_s)
        return float(np.maximum.reduce(delayed_s))


NEVER = Repeated(np.zeros(0), np.zeros(0))


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that has just come, with the facts for its predicted times. Times are from now on.

    column: its column (sage_sched.overload.work). own, before: its work, and the work before it.
    fresh: the work of the jobs that start with it, ahead of the order; None if it starts in its
        turn.
    later: the work of later arrivals that overtake it. starts: the time for which later arrivals
        stop decoding to start ahead of the order.
    target_s: the deadline of its first token, until which it may be held.
    """

    column: Floats
    own: Work
    before: Work
    fresh: Work | None
    later: Repeated
    starts: Repeated
    pace: Pace
    target_s: float

    @property
    def first_s(self) -> float:
        """Return the time until its first token if there is room for it."""
        return self.pace.first_s(self.own)

    @property
    def served_s(self) -> float:
        """Return the time until its last token if it never waits."""
        return self.pace.served_s(self.own)

    @property
    def alone_s(self) -> float:
        """Return the time until its last token on an idle server."""
        return self.pace.alone_s(self.own)

    @property
    def room_s(self) -> float:
        """Return how long the server works on the jobs before it until a batch has room for it."""
        num_batches = self.pace.num_batches(self.before + self.own)
        return float(self.pace.busy_s(self.before)) * max(0.0, 1 - 1 / num_batches)

    def waited_s(self, within_s: float) -> float:
        """Return how long it waits for room if it has to wait for this long anyway."""
        return self.room_s + self.later.within(max(0.0, within_s))

    @property
    def wait_s(self) -> float:
        """Return the time until its last token in which other jobs are served instead."""
        return self.later.delayed_s(self.room_s)

    @property
    def start_s(self) -> float:
        """Return the time until its first token if it starts as soon as it can."""
        if self.fresh is not None:
            return self.pace.first_s(self.fresh + self.own)
        return self.wait_s + self.first_s

    @property
    def ttft_s(self) -> float:
        start_s = self.start_s
        if self.fresh is None:
            return start_s
        return start_s + max(0.0, min(self.pace.held_s, self.target_s - start_s))

    @property
    def ttlt_s(self) -> float:
        return self.starts.delayed_s(self.wait_s + self.served_s)
