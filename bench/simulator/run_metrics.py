"""What is said of a run beside SGLang's numbers: waiting, drain, fairness."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def run_metrics(
    sent_s: Numbers,
    first_s: Numbers,
    last_s: Numbers,
    output_tokens: NDArray[np.int64],
    unloaded_s: Numbers,
) -> dict[str, float]:
    """By the names that docs/benchmarking.md explains.

    Of each request: when it was sent, when its first and its last token came, how many tokens its
    answer has, and its time to the last token alone on the server.
    """
    ttlt_s = last_s - sent_s
    waited_s = ttlt_s - unloaded_s
    began_s, ended_s = float(sent_s.min()), float(sent_s.max())
    arrivals_s = ended_s - began_s
    return {
        "mean_waited_s": float(waited_s.mean()),
        "median_waited_s": float(np.median(waited_s)),
        "p99_waited_s": float(np.percentile(waited_s, 99)),
        "arrivals_s": arrivals_s,
        "arrivals_per_ttlt": arrivals_s / float(ttlt_s.mean()),
        "arriving_throughput": _tokens_until(ended_s, first_s, last_s, output_tokens) / arrivals_s
        if arrivals_s > 0
        else 0.0,
        "drain_s": max(0.0, float(last_s.max()) - ended_s),
        "drain_share": float((last_s > ended_s).mean()),
    }


def _tokens_until(
    end_s: float, first_s: Numbers, last_s: Numbers, output_tokens: NDArray[np.int64]
) -> float:
    """Those of an answer come evenly after its first."""
    share = decoded_share(end_s, first_s, last_s)
    tokens = 1 + (output_tokens - 1) * np.clip(share, 0, 1)
    return float(tokens[first_s <= end_s].sum())


def decoded_share(until_s: float, first_s: Numbers, last_s: Numbers) -> Numbers:
    """Of the time from each answer's first token to its last, what has passed by then; below 0
    before the first."""
    decode_s, passed_s = last_s - first_s, np.minimum(last_s, until_s) - first_s
    return np.divide(passed_s, decode_s, out=np.ones_like(decode_s), where=decode_s > 0)


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
