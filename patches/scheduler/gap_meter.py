"""Measures the gaps between successive tokens of answers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from patches.engine_types import Batch, Req
from patches.hook import harmless
from patches.listener import Listener
from sage_sched.followed import Followed
from sage_sched.gaps import GAPS_PER_S, percentile_s

# Reports cover the current span and the one before.
_SPAN_S = 60.0


class _Stretch:
    """Successive steps, each of which gave its requests one token. A request refers to it, so it
    refers to none."""

    __slots__ = ("last_s", "num_steps")

    def __init__(self, last_s: float) -> None:
        self.last_s, self.num_steps = last_s, 0


_NO_TOKEN = 0, 0, _Stretch(0.0)


class GapMeter(Listener):
    """Measures the gaps between the tokens of all answers of one scheduler. A token counts when its
    step ends, before it is sent to the client. No decision uses these readings of the clock.

    A step without drafts gives one token to each request of the step before, so these are counted
    at once. A request that is retracted during a step gets none, but is counted once more. Its
    sage_token is how many tokens it had when it joined the current stretch, less the steps of the
    stretch until then, and its retractions.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        # Gaps of the current span, and of the one before.
        self._now, self._before = _no_gaps(), _no_gaps()
        self._stretch, self._batch = _Stretch(0.0), Followed[Req]()
        # Under overlap these are in one more batch.
        self._ended: list[Req] = []

    @harmless
    def stepped(self, batch: Batch, result: Any) -> None:
        """Count the gaps before the tokens of a step."""
        now_s = time.monotonic()
        if now_s - self._since_s > _SPAN_S:
            self._since_s = now_s
            self._now, self._before = _no_gaps(), self._now
        reqs = batch.reqs
        if self._ended:
            ended = set(map(id, self._ended))
            reqs = [req for req in reqs if id(req) not in ended]
            self._ended.clear()
        if batch.forward_mode.is_extend_without_speculative():
            decoding = set(map(id, batch.decoding_reqs or ()))
            for req in reqs:
                if id(req) not in decoding and self._count(req, now_s):
                    if getattr(req, "sage_token", _NO_TOKEN)[2] is self._stretch:
                        # It was retracted since the last decode step, so all join a new stretch.
                        self._stretch, self._batch = _Stretch(now_s), Followed[Req]()
                    req.sage_token = len(req.output_ids), req.retraction_count, _Stretch(now_s)
            reqs = [req for req in reqs if id(req) in decoding]
            if not reqs:  # the requests that decode stay in the stretch until the next step
                return
        gone, came, _, _ = self._batch.look(reqs)
        for req in gone:
            self._leaves(req)
        if came:
            new = set(map(id, came))
            reqs = [req for req in reqs if id(req) not in new]
        stretch = self._stretch
        if getattr(result, "accept_lens", None) is None:
            self._now["stayed"][_gap(stretch.last_s, now_s)] += len(reqs)
            stretch.last_s = now_s
            stretch.num_steps += 1
        else:
            stretch = self._stretch = _Stretch(now_s)
            came = [*reqs, *came]
        for req in came:
            self._count(req, now_s)
            num_tokens = len(req.output_ids) - stretch.num_steps
            req.sage_token = num_tokens, req.retraction_count, stretch

    def _count(self, req: Req, now_s: float) -> bool:
        """Count the gap before the tokens that a request has got in this step; return whether it
        has got any."""
        num_tokens = len(req.output_ids)
        num_before, retractions_before, before = getattr(req, "sage_token", _NO_TOKEN)
        num_before += before.num_steps
        if num_before and num_tokens > num_before:
            found = self._now["left" if req.retraction_count > retractions_before else "stayed"]
            found[_gap(before.last_s, now_s)] += 1
            found[0] += num_tokens - num_before - 1  # tokens of the same step
        return num_tokens != num_before

    def _leaves(self, req: Req) -> None:
        """Keep when a request that has left the batch had its last token."""
        _, retractions, stretch = getattr(req, "sage_token", _NO_TOKEN)
        req.sage_token = len(req.output_ids), retractions, _Stretch(stretch.last_s)

    def ended(self, req: Req, was_aborted: bool) -> None:
        self._ended.append(req)

    def stats(self) -> dict[str, Any]:
        """Return the gaps of the last minute or two, by whether requests stayed on the device."""
        now = self._now.items()
        return {"gaps": {whose: _summary(gaps + self._before[whose]) for whose, gaps in now}}


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
