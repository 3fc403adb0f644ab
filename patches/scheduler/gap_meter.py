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
# Far below any sum of tokens: some request has got no token, so the next step counts each.
_UNEVEN = -(1 << 60)


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

    Most steps give one token to each request of the step before. These are counted at once. A
    request's sage_token is how many tokens it had when it joined the current stretch, less the
    steps of the stretch until then, and its retractions.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        # Gaps of the current span, and of the one before.
        self._now, self._before = _no_gaps(), _no_gaps()
        self._stretch, self._batch = _Stretch(0.0), Followed[Req]()
        # The tokens of the requests in the stretch.
        self._num_tokens = 0
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
        gone, came, _, _ = self._batch.look(reqs)
        for req in gone:
            self._leaves(req)
        if came:
            new = set(map(id, came))
            reqs = [req for req in reqs if id(req) not in new]
        # A request that is retracted leaves the batch, or gets no token. Only speculative decoding
        # can give two tokens to one request and none to another.
        is_even = getattr(result, "accept_lens", None) is None
        num_tokens, before = sum([len(req.output_ids) for req in reqs]), self._num_tokens
        self._num_tokens = num_tokens
        if is_even and num_tokens == before + len(reqs):
            stretch = self._stretch
            self._now["stayed"][_gap(stretch.last_s, now_s)] += len(reqs)
            stretch.last_s = now_s
            stretch.num_steps += 1
        else:
            self._stretch, self._num_tokens = _Stretch(now_s), 0
            came = [*reqs, *came]
        for req in came:
            self._joins(req, now_s)

    def _joins(self, req: Req, now_s: float) -> None:
        """Count the gap before the latest tokens of a request, which are of this step if any."""
        stretch = self._stretch
        num_tokens, retractions = len(req.output_ids), req.retraction_count
        num_before, retractions_before, before = getattr(req, "sage_token", _NO_TOKEN)
        num_before += before.num_steps
        if num_tokens == num_before:
            self._num_tokens = _UNEVEN
            return
        if num_before:
            found = self._now["left" if retractions > retractions_before else "stayed"]
            found[_gap(before.last_s, now_s)] += 1
            found[0] += num_tokens - num_before - 1  # tokens of the same step
        req.sage_token = num_tokens - stretch.num_steps, retractions, stretch
        self._num_tokens += num_tokens

    def _leaves(self, req: Req) -> None:
        """Keep when a request that has left the batch had its last token."""
        num_tokens, retractions, stretch = getattr(req, "sage_token", _NO_TOKEN)
        num_tokens += stretch.num_steps
        req.sage_token = num_tokens, retractions, _Stretch(stretch.last_s)
        self._num_tokens -= num_tokens

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
