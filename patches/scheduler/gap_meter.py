"""Measures the gaps between successive tokens of answers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from patches.engine_types import Batch, Req
from patches.hook import harmless
from patches.listener import Listener
from sage_sched.gap import GAPS_PER_S, percentile_s

# Reports cover the current span and the one before.
_SPAN_S = 60.0


class _Stretch:
    """Successive steps, each of which gave the same requests one token. A request refers to it, so
    it refers to none."""

    __slots__ = ("last_s", "num_steps")

    def __init__(self, now_s: float) -> None:
        self.last_s, self.num_steps = now_s, 0


class GapMeter(Listener):
    """Measures the gaps between the tokens of all answers of one scheduler. A token counts when its
    step ends, before it is sent to the client. No decision uses these readings of the clock.

    Most steps give the same requests one token each, as the step before. These are counted at once.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        # Gaps of the current span, and of the one before.
        self._now, self._before = _no_gaps(), _no_gaps()
        # The requests of the current stretch, and the sums of their tokens and their retractions.
        self._stretch, self._reqs, self._sums = _Stretch(0.0), list[Req](), (0, 0)

    @harmless
    def stepped(self, batch: Batch, result: Any) -> None:
        """Count the gaps before the tokens of a step."""
        now_s = time.monotonic()
        if now_s - self._since_s > _SPAN_S:
            self._since_s = now_s
            self._now, self._before = _no_gaps(), self._now
        reqs, stretch = batch.reqs, self._stretch
        num_tokens, num_retractions = self._sums
        self._sums = _sums(reqs)
        # Only speculative decoding can give two tokens to one request and none to another.
        is_even = getattr(result, "accept_lens", None) is None
        goes_on = self._sums == (num_tokens + len(reqs), num_retractions) and reqs == self._reqs
        if reqs and is_even and goes_on:
            self._now["stayed"][_gap(stretch.last_s, now_s)] += len(reqs)
            stretch.last_s = now_s
            stretch.num_steps += 1
        else:
            self._count_each(reqs, now_s)

    def _count_each(self, reqs: list[Req], now_s: float) -> None:
        stretch, num_got = _Stretch(now_s), 0
        for req in reqs:
            num_tokens, retractions = len(req.output_ids), req.retraction_count
            last_tokens, last_retractions, last = getattr(req, "sage_token", (0, 0, stretch))
            last_tokens += last.num_steps
            if num_tokens == last_tokens:
                continue
            num_got += 1
            if last_tokens:
                found = self._now["left" if retractions > last_retractions else "stayed"]
                found[_gap(last.last_s, now_s)] += 1
                found[0] += num_tokens - last_tokens - 1  # tokens of the same step
            req.sage_token = num_tokens, retractions, stretch
        self._stretch, self._reqs = stretch, [*reqs] if num_got == len(reqs) else []

    def ended(self, req: Req, was_aborted: bool) -> None:
        self._reqs = []  # keep no request alive

    def stats(self) -> dict[str, Any]:
        """Return the gaps of the last minute or two, by whether requests stayed on the device."""
        now = self._now.items()
        return {"gaps": {whose: _summary(gaps + self._before[whose]) for whose, gaps in now}}


def _sums(reqs: list[Req]) -> tuple[int, int]:
    """Return the number of tokens, and of retractions, of requests."""
    return sum([len(req.output_ids) for req in reqs]), sum([req.retraction_count for req in reqs])


def _gap(last_s: float, now_s: float) -> int:
    """Return a gap in units of 1/GAPS_PER_S seconds."""
    return round((now_s - last_s) * GAPS_PER_S)


def _no_gaps() -> dict[str, Counter[int]]:
    """Return empty counts of gaps, in units of 1/GAPS_PER_S seconds: for requests that stayed on
    the device, and for requests that left it between two tokens."""
    return {"stayed": Counter(), "left": Counter()}


def _summary(gaps: Counter[int]) -> dict[str, float]:
    """Return statistics of the gaps; {} if there are none."""
    if not gaps:
        return {}
    total_s = sum(gap * number for gap, number in gaps.items()) / GAPS_PER_S
    return {
        "num": gaps.total(),
        "mean_ms": 1e3 * total_s / gaps.total(),
        "p99_ms": 1e3 * percentile_s(gaps, 99),
        "p999_ms": 1e3 * percentile_s(gaps, 99.9),
        "longest_ms": 1e3 * percentile_s(gaps, 100),
    }
