"""Predicts the wait of a newcomer."""

from __future__ import annotations

from dataclasses import dataclass

from sage_sched.distribution import Floats
from sage_sched.overload.work import Pace, Work

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that has just come, with the facts for its predicted times. Times are from now on.

    row: its row (sage_sched.overload.work). own, before: its work, and the work before it. fresh:
    the work of the jobs that start with it, ahead of the order; None if it starts in its turn.
    latest, span_s: the work before it that the latest arrivals brought, and the seconds in which
        they came.
    early: the work of all those arrivals if they start ahead of the order, which stops decoding.
    """

    row: Floats
    own: Work
    before: Work
    fresh: Work | None
    latest: Work
    span_s: float
    early: Work
    pace: Pace

    @property
    def first_s(self) -> float:
        """Return the time until its first token if there is room for it."""
        return self.pace.first_s(self.own)

    @property
    def alone_s(self) -> float:
        """Return the time until its last token if it never waits, in a full batch."""
        return self.pace.alone_s(self.own)

    def waited_s(self, within_s: float) -> float:
        """Return how long the server works on other jobs until a batch has room for this one: on
        the jobs before it, and on jobs that arrive within within_s and overtake it, at the latest
        rate. If the latest arrivals span less time than within_s, they count once: a burst is no
        rate."""
        num_batches = self.pace.num_batches(self.before + self.own)
        room_s = self.pace.busy_s(self.before) * max(0.0, 1 - 1 / num_batches)
        if within_s <= 0.0:
            return room_s
        return room_s + self.pace.busy_s(self.latest) * (within_s / max(self.span_s, within_s))

    def stopped_s(self, within_s: float) -> float:
        """Return how long its decoding stops within this time for the starts of others, at the rate
        of the latest arrivals, but no faster than the server serves them."""
        span_s = max(self.span_s, self.pace.busy_s(self.early), within_s)
        return self.pace.starts_s(self.early) * (within_s / span_s)

    @property
    def wait_s(self) -> float:
        """Return the time until its last token in which other jobs are served instead."""
        wait_s = 0.0
        for _ in range(_ROUNDS):
            wait_s = self.waited_s(wait_s)
        return wait_s

    @property
    def ttft_s(self) -> float:
        if self.fresh is not None:
            return self.pace.first_s(self.fresh + self.own)
        return self.wait_s + self.first_s

    @property
    def ttlt_s(self) -> float:
        undisturbed_s = ttlt_s = self.wait_s + self.alone_s
        for _ in range(_ROUNDS):
            ttlt_s = undisturbed_s + self.stopped_s(ttlt_s)
        return ttlt_s
