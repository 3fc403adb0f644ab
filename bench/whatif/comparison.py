"""Computes ratios of simulated results, and their confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.experiment.goodput import rate_within
from bench.experiment.stats import Ratio, against, seconds
from bench.experiment.table import aligned
from bench.whatif.simulation import Outcome
from bench.workloads.prompts import WorkloadError

_NUM_DRAWS = 400
# The interval's ends: 90 % of draws lie between.
_LOW, _HIGH = 5.0, 95.0
_MIN_BLOCKS, _MAX_BLOCKS = 5, 50


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of the log under a policy: times in seconds, as means over the usual variants.

    throughput: output tokens per second between the first arrival and the last.
    mean_ratio, p99_ratio: to the first policy, with 90 % intervals over blocks of the log, and over
        better and worse predictions.
    """

    policy: str
    mean_ttlt_s: float
    p99_ttlt_s: float
    mean_ttft_s: float
    p99_itl_s: float
    longest_gap_s: float
    waited_s: float
    throughput: float
    mean_ratio: Ratio
    p99_ratio: Ratio


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row for each policy that serves the whole log, with ratios to the first of them.

    ended_s: for each other policy, when its scheduler ended, after the log's first request.
    """

    rows: list[Row]
    ended_s: dict[str, float]


def compare(outcomes: Sequence[Outcome], seed: int = 0) -> Comparison:
    """Compare the policies' outcomes. Raises WorkloadError if the scheduler ends under all of
    them."""
    served = [outcome for outcome in outcomes if outcome.ended_s is None]
    if not served:
        raise WorkloadError("SGLang's scheduler ends under each of these policies: out of memory")
    ended_s = {each.policy: each.ended_s for each in outcomes if each.ended_s is not None}
    return Comparison([_row(outcome, served[0], seed) for outcome in served], ended_s)


def _row(outcome: Outcome, first: Outcome, seed: int) -> Row:
    of = [result.metrics() for result in outcome.results[: outcome.usual]]

    def mean(name: str) -> float:
        return float(np.mean([metrics[name] for metrics in of]))

    return Row(
        outcome.policy,
        mean("mean_e2e_latency_ms") / 1e3,
        mean("p99_e2e_latency_ms") / 1e3,
        mean("mean_ttft_ms") / 1e3,
        mean("p99_itl_ms") / 1e3,
        mean("max_itl_ms") / 1e3,
        mean("mean_waited_s"),
        mean("arriving_throughput"),
        _ratio(outcome, first, seed, np.mean),
        _ratio(outcome, first, seed, _p99),
    )


def _p99(values: NDArray[np.float64]) -> float:
    return float(np.percentile(values, 99))


def _ratio(
    outcome: Outcome, first: Outcome, seed: int, measure: Callable[[NDArray[np.float64]], float]
) -> Ratio:
    """Return a ratio with its interval. Each draw takes blocks of the log, the same for both, and
    one of the variants."""

    def usual(of: Outcome) -> float:
        return float(np.mean([measure(result.ttlt_s) for result in of.results[: of.usual]]))

    value = usual(outcome) / usual(first)
    if outcome is first:
        return Ratio(1.0, 1.0, 1.0)
    rng = np.random.default_rng([seed, 8])
    drawn = []
    for places in _draws(first.results[0].ttlt_s.size, seed):
        ours = outcome.results[int(rng.integers(len(outcome.results)))].ttlt_s[places]
        theirs = first.results[int(rng.integers(len(first.results)))].ttlt_s[places]
        drawn.append(measure(ours) / measure(theirs))
    low, high = np.percentile(drawn, [_LOW, _HIGH])
    return Ratio(value, min(float(low), value), max(float(high), value))


def _draws(num_requests: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield indices of requests _NUM_DRAWS times, each time about as many as there are requests.
    They are blocks of neighbours, because requests that came together waited together (circular
    block bootstrap, Politis and Romano 1992)."""
    num_blocks = int(np.clip(np.sqrt(num_requests), _MIN_BLOCKS, _MAX_BLOCKS))
    within = np.arange(max(1, -(-num_requests // num_blocks)))
    rng = np.random.default_rng([seed, 7])
    for _ in range(_NUM_DRAWS):
        starts = rng.integers(num_requests, size=(num_blocks, 1))
        yield ((starts + within) % num_requests).ravel()


def sentence(rows: Sequence[Row], policy: str) -> str:
    """Return the gain from this policy as a sentence, or its result if it is the first policy; ""
    if no row has it."""
    first = rows[0]
    row = next((row for row in rows if row.policy == policy), None)
    if row is None:
        return ""
    rivals = [other for other in rows if other not in (row, first)]
    best = min(rivals, key=lambda other: other.mean_ratio.value, default=None)
    mean_s = seconds(row.mean_ttlt_s)
    if row is first:
        said = f"`{policy}`, as now, finishes answers in {mean_s} on average."
    else:
        ours, theirs = f"`{policy}`", f"your policy, `{first.policy}`,"
        said = against(ours, row.mean_ttlt_s, theirs, first.mean_ttlt_s)
        low, high = (round(100 * (1 - end)) for end in (row.mean_ratio.high, row.mean_ratio.low))
        said += f" (90 % interval: {low} % to {high} %)."
    if best is None:
        return said
    return f"{said} The best of the others is `{best.policy}`, in {seconds(best.mean_ttlt_s)}."


def good_table(good: Mapping[str, Sequence[float]], multiples: Sequence[float]) -> str:
    """Return the share of good requests by policy and multiple of the log's rate, and the largest
    multiple at which 95 % are good."""
    head = ["policy", *(f"{multiple:g}x" for multiple in multiples), "95 % good up to"]
    body = []
    for policy, shares in good.items():
        most, sign = rate_within(zip(multiples, shares, strict=True), 0.95)
        up_to = f"less than {most:g}x" if sign == "<" else f"{most:.2f}x"
        more = " or more" if sign == "≥" else ""
        body.append([policy, *(f"{share:.3f}" for share in shares), up_to + more])
    return aligned(head, body)


def endings(ended_s: Mapping[str, float], policy: str) -> str:
    """Return a line for each policy under which the scheduler ends, and a remark if it survives
    under `policy`; "" if it ends under none."""
    lines = [
        f"{name}: SGLang's scheduler ends here after {at_s:.0f} s, out of KV memory"
        for name, at_s in ended_s.items()
    ]
    if lines and policy not in ended_s:
        lines.append(f"{policy} serves this log to its end.")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Return the table as text."""
    head = (
        "policy", "mean TTLT ratio", "p99 ratio", "mean TTLT s", "p99 s", "TTFT s", "waited s",
        "p99 ITL s", "longest gap s", "tokens/s",
    )  # fmt: skip
    body = [
        (
            row.policy, str(row.mean_ratio), str(row.p99_ratio),
            *(f"{value:.2f}" for value in (
                row.mean_ttlt_s, row.p99_ttlt_s, row.mean_ttft_s, row.waited_s, row.p99_itl_s,
                row.longest_gap_s,
            )),
            f"{row.throughput:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    return aligned(head, body)
