"""How long answers stand still between two tokens, on a server."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from patches.engine_types import Batch
from patches.hook import harmless
from sage_sched.gap import GAPS_PER_S, percentile_s

# The latest gaps are told, of one to two such spans.
_SPAN_S = 60.0


class _Gaps:
    """Of the latest span and the one before it, how often each gap came, in 1/GAPS_PER_S."""

    def __init__(self) -> None:
        self.now: Counter[int] = Counter()
        self.before: Counter[int] = Counter()

    def pass_on(self) -> None:
        """A span is over."""
        self.now, self.before = Counter(), self.now

    def stats(self) -> dict[str, float]:
        """Empty if no answer has gone on."""
        gaps = self.now + self.before
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


class GapMeter:
    """Of all answers of one scheduler. A token counts when it comes out of its step, before it goes
    to the client. The clock is read for these numbers alone."""

    def __init__(self) -> None:
        # Of those that stayed on the device, and of those that left it between two tokens.
        self._gaps = {False: _Gaps(), True: _Gaps()}
        self._since_s = time.monotonic()

    @harmless
    def stepped(self, batch: Batch) -> None:
        """A batch's results are in."""
        now_s = time.monotonic()
        if now_s - self._since_s > _SPAN_S:
            self._since_s = now_s
            for gaps in self._gaps.values():
                gaps.pass_on()
        for req in batch.reqs:
            num_tokens, departures = len(req.output_ids), req.retraction_count
            last_tokens, last_departures, last_s = getattr(req, "sage_token", (0, 0, now_s))
            if num_tokens == last_tokens:
                continue
            if last_tokens:
                found = self._gaps[departures > last_departures].now
                found[round((now_s - last_s) * GAPS_PER_S)] += 1
                found[0] += num_tokens - last_tokens - 1  # out of the same step
            req.sage_token = num_tokens, departures, now_s

    def stats(self) -> dict[str, Any]:
        """For /server_info: of the last minute or two, by whether they stayed on the device."""
        return {"stayed": self._gaps[False].stats(), "left": self._gaps[True].stats()}
