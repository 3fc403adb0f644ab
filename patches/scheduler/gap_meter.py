"""Measures the gaps between successive tokens of answers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from patches.engine_types import Batch
from patches.hook import harmless
from patches.listener import Listener
from sage_sched.gap import GAPS_PER_S, percentile_s

# Reports cover the current span and the one before.
_SPAN_S = 60.0


class GapMeter(Listener):
    """Measures the gaps between the tokens of all answers of one scheduler. A token counts when its
    step ends, before it is sent to the client. No decision uses these readings of the clock."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        # Gaps of the current span, and of the one before.
        self._now, self._before = _no_gaps(), _no_gaps()

    @harmless
    def stepped(self, batch: Batch, result: Any) -> None:
        """Count the gaps before the tokens of a step."""
        now_s = time.monotonic()
        if now_s - self._since_s > _SPAN_S:
            self._since_s = now_s
            self._now, self._before = _no_gaps(), self._now
        for req in batch.reqs:
            num_tokens, retractions = len(req.output_ids), req.retraction_count
            last_tokens, last_retractions, last_s = getattr(req, "sage_token", (0, 0, now_s))
            if num_tokens == last_tokens:
                continue
            if last_tokens:
                found = self._now["left" if retractions > last_retractions else "stayed"]
                found[round((now_s - last_s) * GAPS_PER_S)] += 1
                found[0] += num_tokens - last_tokens - 1  # tokens of the same step
            req.sage_token = num_tokens, retractions, now_s

    def stats(self) -> dict[str, Any]:
        """Return the gaps of the last minute or two, by whether requests stayed on the device."""
        now = self._now.items()
        return {"gaps": {whose: _summary(gaps + self._before[whose]) for whose, gaps in now}}


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
