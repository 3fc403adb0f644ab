"""Counts the time between two tokens."""

from __future__ import annotations

from collections import Counter

# Gaps are counted to the tenth of a millisecond.
GAPS_PER_S = 10_000


def percentile_s(gaps: Counter[int], percent: float) -> float:
    """Return a percentile of gaps in seconds; 0 if there is none.

    gaps: how often each gap came, by its length in 1/GAPS_PER_S seconds.
    """
    left = percent / 100 * gaps.total()
    for gap, number in sorted(gaps.items()):
        left -= number
        if left <= 0:
            return gap / GAPS_PER_S
    return 0.0
