"""How evenly requests are served: slowdown by length, and how far one is overtaken."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def fairness_metrics(
    arrival_s: Numbers,
    last_s: Numbers,
    alone_s: Numbers,
    input_tokens: NDArray[np.int64],
    answer_tokens: NDArray[np.int64],
) -> dict[str, float]:
    """Of each request, arrays of shape (requests,): when it came and had its last token, and what
    it would take alone on the engine.

    jain_percent: Jain's index of the slowdowns (time to the last token over that alone): 100 if
    all are slowed down alike. slowdown_*: the mean slowdown of the shortest and
    of the longest third, by answer and by prompt. largest_overtaking: see there.
    """
    slowdown = (last_s - arrival_s) / alone_s
    return {
        "jain_percent": float(100 * slowdown.mean() ** 2 / np.square(slowdown).mean()),
        **_by_thirds("answers", slowdown, answer_tokens),
        **_by_thirds("prompts", slowdown, input_tokens),
        "largest_overtaking": largest_overtaking(arrival_s, last_s, alone_s),
    }


def _by_thirds(name: str, slowdown: Numbers, tokens: NDArray[np.int64]) -> dict[str, float]:
    low, high = np.percentile(tokens, [100 / 3, 200 / 3])
    return {
        f"slowdown_short_{name}": float(slowdown[tokens <= low].mean()),
        f"slowdown_long_{name}": float(slowdown[tokens >= high].mean()),
    }


def largest_overtaking(arrival_s: Numbers, last_s: Numbers, alone_s: Numbers) -> float:
    """The work of those that came after a request and ended before it, over the work of those that
    it found unfinished and its own; the largest of all requests. Work: seconds alone. What a bound
    on regret bounds, as far as it can be seen from outside."""
    largest = 0.0
    for came_s, ended_s, own_s in zip(arrival_s, last_s, alone_s, strict=True):
        overtook = (arrival_s > came_s) & (last_s < ended_s)
        found = (arrival_s < came_s) & (last_s > came_s)
        largest = max(largest, float(alone_s[overtook].sum() / (alone_s[found].sum() + own_s)))
    return largest
