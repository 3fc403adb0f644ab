"""Computes metrics of a run that SGLang's benchmark does not have: waiting, drain, fairness."""

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
    """Return metrics by the names that docs/benchmarking.md explains.

    The arguments give each request's send time, the times of its first and its last token, its
    answer's tokens, and its time to the last token alone on the server.
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
    """Return the tokens that have come by then. Tokens of an answer come evenly after its first."""
    share = decoded_share(end_s, first_s, last_s)
    tokens = 1 + (output_tokens - 1) * np.clip(share, 0, 1)
    return float(tokens[first_s <= end_s].sum())


def decoded_share(until_s: float, first_s: Numbers, last_s: Numbers) -> Numbers:
    """Return the share of each answer's decode time that has passed by then; below 0 before the
    first token."""
    decode_s, passed_s = last_s - first_s, np.minimum(last_s, until_s) - first_s
    return np.divide(passed_s, decode_s, out=np.ones_like(decode_s), where=decode_s > 0)


def fairness_metrics(
    arrival_s: Numbers,
    last_s: Numbers,
    alone_s: Numbers,
    input_tokens: NDArray[np.int64],
    answer_tokens: NDArray[np.int64],
) -> dict[str, float]:
    """Return metrics of fairness. The arguments give each request's arrival, its last token and its
    time alone on the engine, shape (requests,).

    jain_percent: Jain's index of the slowdowns: 100 if all are equal. A slowdown is the time to the
        last token, divided by that time alone on the engine.
    slowdown_*: the mean slowdown of the third with the shortest, and with the longest, answers or
        prompts.
    largest_overtaking: see largest_overtaking().
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
    """Return the largest overtaking of a request: the work of later arrivals that ended before it,
    divided by the sum of its own work and the unfinished work at its arrival. Work is measured in
    seconds alone on the engine. A bound on regret bounds this figure."""
    largest = 0.0
    for came_s, ended_s, own_s in zip(arrival_s, last_s, alone_s, strict=True):
        overtook = (arrival_s > came_s) & (last_s < ended_s)
        found = (arrival_s < came_s) & (last_s > came_s)
        largest = max(largest, float(alone_s[overtook].sum() / (alone_s[found].sum() + own_s)))
    return largest
