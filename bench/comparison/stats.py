"""From runs to medians over seeds and ratios to the first policy, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.run_metrics import DRAIN, WAITED

Run = Mapping[str, Any]
# policy -> rate -> metric -> {"median", "ratio", "ratio_low", "ratio_high"}
Summary = dict[str, dict[str, dict[str, dict[str, float]]]]

# SGLang's names (sglang/benchmark/serving.py); TTLT is its end-to-end latency.
METRICS = (
    "mean_e2e_latency_ms",
    "median_e2e_latency_ms",
    "p90_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p90_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_itl_ms",
    "max_itl_ms",
    "largest_slowdown",
    "output_throughput",
    "request_throughput",
    "duration",
    *WAITED,
    *DRAIN,
)


def ordered(values: Iterable[str]) -> list[str]:
    """Distinct values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def summarize(runs: Sequence[Run]) -> Summary:
    """Median over seeds of every metric, and of its ratio to the first policy's at the same seed.

    ratio_low and ratio_high enclose the median ratio of the population with the confidence that
    the number of seeds allows (see sign_interval). Invalid runs are left out, with their pairs.
    Raises ValueError where no run is valid.
    """
    valid = [run for run in runs if run["valid"]]
    if not valid:
        raise ValueError("no valid run to summarize")
    first = runs[0]["policy"]
    summary: Summary = {}
    for policy in ordered(run["policy"] for run in valid):
        for rate in ordered(run["rate"] for run in valid if run["policy"] == policy):
            ours = _by_seed(valid, policy, rate)
            theirs = _by_seed(valid, first, rate)
            summary.setdefault(policy, {})[rate] = {
                metric: _row(ours, theirs, metric) for metric in METRICS
            }
    return summary


def _by_seed(runs: Sequence[Run], policy: str, rate: str) -> dict[int, Run]:
    return {run["seed"]: run for run in runs if (run["policy"], run["rate"]) == (policy, rate)}


def _row(ours: dict[int, Run], theirs: dict[int, Run], metric: str) -> dict[str, float]:
    seeds = sorted(ours.keys() & theirs.keys())
    ratios = [ours[seed][metric] / theirs[seed][metric] for seed in seeds if theirs[seed][metric]]
    low, high = sign_interval(ratios)
    return {
        "median": float(np.median([run[metric] for run in ours.values()])),
        "ratio": float(np.median(ratios)) if ratios else math.nan,
        "ratio_low": low,
        "ratio_high": high,
    }


def sign_interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float]:
    """An interval for the median between two of the values, by their signs alone.

    The narrowest pair of order statistics that encloses the median with at least `confidence`
    (binomial, no assumption on the distribution), or the range where there are too few values for
    that: 5 seeds give the range, and 94 %. NaN without values.
    """
    if not values:
        return math.nan, math.nan
    ascending = sorted(values)
    n, skipped = len(ascending), 0
    missed = 2 * 0.5**n
    while skipped + 1 < n // 2:
        missed += 2 * math.comb(n, skipped + 1) * 0.5**n
        if missed > 1 - confidence:
            break
        skipped += 1
    return ascending[skipped], ascending[n - 1 - skipped]


def with_interval(values: Sequence[float], digits: int = 2) -> str:
    """Their median, and the interval of the sign test: "0.45 (0.45 to 0.47)"."""
    low, high = sign_interval(values)
    return f"{np.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def headline(summary: Summary) -> str:
    """What came of `sage` at the last rate, in one sentence; "" where it was not compared."""
    first, *others = summary
    if "sage" not in others:
        return ""
    rate = ordered(rate for by_rate in summary.values() for rate in by_rate)[-1]
    means = {
        policy: by_rate[rate]["mean_e2e_latency_ms"]
        for policy, by_rate in summary.items()
        if rate in by_rate
    }
    if "sage" not in means or first not in means:
        return ""
    ours = means.pop("sage")
    best = min(means, key=lambda policy: means[policy]["ratio"])
    sentence = (
        f"Under sage the mean time to the last token was {ours['ratio']:.2f} of what it was under "
        f"{first} ({ours['ratio_low']:.2f} to {ours['ratio_high']:.2f} over the seeds)"
    )
    if best == first:
        return f"{sentence}."
    share = ours["ratio"] / means[best]["ratio"]
    return f"{sentence}, and {share:.2f} of what it was under {best}, the best of the others."


_RATIOS = ("mean_e2e_latency_ms", "p99_e2e_latency_ms", "mean_waited_s")
_COLUMNS = (
    ("mean TTLT", "mean_e2e_latency_ms", 1e-3, "s"),
    ("p50", "median_e2e_latency_ms", 1e-3, "s"),
    ("p90", "p90_e2e_latency_ms", 1e-3, "s"),
    ("p99", "p99_e2e_latency_ms", 1e-3, "s"),
    ("mean TTFT", "mean_ttft_ms", 1e-3, "s"),
    ("p99 TTFT", "p99_ttft_ms", 1e-3, "s"),
    ("p99 ITL", "p99_itl_ms", 1.0, "ms"),
    ("longest gap", "max_itl_ms", 1e-3, "s"),
    ("waited", "mean_waited_s", 1.0, "s"),
    ("p99 waited", "p99_waited_s", 1.0, "s"),
    ("slowdown", "largest_slowdown", 1.0, "x"),
    ("tokens/s", "output_throughput", 1.0, ""),
    ("arrivals", "arrivals_per_ttlt", 1.0, "x TTLT"),
    ("drain", "drain_s", 1.0, "s"),
)


def rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """The table: its head, and a row for each rate and policy."""
    head = ["rate", "policy", "mean TTLT ratio", "p99 TTLT ratio", "mean waited ratio"]
    head += [f"{name} {unit}".strip() for name, _, _, unit in _COLUMNS]
    body = []
    for rate in ordered(rate for by_rate in summary.values() for rate in by_rate):
        for policy, by_rate in summary.items():
            if rate not in by_rate:
                continue
            metrics = by_rate[rate]
            ratios = [_ratio(metrics[name]) for name in _RATIOS]
            values = [f"{metrics[name]['median'] * scale:.2f}" for _, name, scale, _ in _COLUMNS]
            body.append([rate, policy, *ratios, *values])
    return head, body


def _ratio(metric: dict[str, float]) -> str:
    return f"{metric['ratio']:.2f} ({metric['ratio_low']:.2f} to {metric['ratio_high']:.2f})"


def table(summary: Summary) -> str:
    """The table as text: medians over seeds, ratios to the first policy with their interval."""
    head, body = rows(summary)
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
