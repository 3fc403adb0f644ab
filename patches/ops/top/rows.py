"""Lists the figures of `sage-sched top`, which the terminal and the page share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from patches.ops.top.reading import Window

# The SLO that the project's reports use.
_TTFT_S, _TPOT_S = 2.0, 0.1
_TTFT = "sglang:time_to_first_token_seconds"
_TPOT = "sglang:request_time_per_output_token_seconds"
_E2E = "sglang:e2e_request_latency_seconds"


class Row(NamedTuple):
    """One figure.

    unit: "" for a count, "s", "ms", "%" for a share, "/s" for a rate.
    value: NaN if the server does not report it. name: its name in JSON.
    """

    group: str
    name: str
    title: str
    unit: str
    value: Callable[[Window], float]


def _p(series: str, q: float) -> Callable[[Window], float]:
    return lambda window: window.quantile(series, q)


def _sum(series: str) -> Callable[[Window], float]:
    return lambda window: window.last.sum(series)


def _max(series: str) -> Callable[[Window], float]:
    return lambda window: window.last.max(series)


def _rate(series: str) -> Callable[[Window], float]:
    return lambda window: window.rate(series)


def _pass_s(window: Window) -> float:
    num_passes = window.growth("sage:passes_total")
    return window.growth("sage:pass_seconds_total") / num_passes if num_passes > 0 else math.nan


ROWS: tuple[Row, ...] = (
    Row("Requests", "num_waiting", "waiting", "", _sum("sglang:num_queue_reqs")),
    Row("Requests", "num_running", "running", "", _sum("sglang:num_running_reqs")),
    Row("Requests", "num_swapped", "swapped out", "", _sum("sage:swapped_requests")),
    Row("Requests", "oldest_wait_s", "longest wait", "s", _max("sage:oldest_wait_seconds")),
    Row("Memory", "kv_used_share", "KV pool", "%", _max("sglang:token_usage")),
    Row("Memory", "host_used_share", "host memory for KV", "%", _max("sage:host_used_ratio")),
    Row("Memory", "preemptions_per_s", "preemptions", "/s", _rate("sage:preemptions_total")),
    Row("Latency", "ttft_p50_s", "TTFT, median", "s", _p(_TTFT, 0.5)),
    Row("Latency", "ttft_p99_s", "TTFT, p99", "s", _p(_TTFT, 0.99)),
    Row("Latency", "tpot_p50_s", "TPOT, median", "ms", _p(_TPOT, 0.5)),
    Row("Latency", "tpot_p99_s", "TPOT, p99", "ms", _p(_TPOT, 0.99)),
    Row("Latency", "e2e_p50_s", "end to end, median", "s", _p(_E2E, 0.5)),
    Row("Latency", "e2e_p99_s", "end to end, p99", "s", _p(_E2E, 0.99)),
    Row("Goodput", "ttft_attainment", "TTFT within 2 s", "%",
        lambda window: window.share_within(_TTFT, _TTFT_S)),
    Row("Goodput", "tpot_attainment", "TPOT within 100 ms", "%",
        lambda window: window.share_within(_TPOT, _TPOT_S)),
    Row("Goodput", "requests_per_s", "requests", "/s", _rate("sglang:num_requests_total")),
    Row("Goodput", "tokens_per_s", "output tokens", "/s", _rate("sglang:generation_tokens_total")),
    Row("Goodput", "refusals_per_s", "refusals", "/s", _rate("sage:refused_total")),
    Row("Predictions", "num_records", "answers in the history", "", _max("sage:predictor_records")),
    Row("Predictions", "coverage_share", "within the central 80 %", "%",
        _max("sage:prediction_coverage_ratio")),
    Row("Predictions", "error_saved_share", "error saved (CRPS)", "%",
        _max("sage:prediction_crps_gain_ratio")),
    Row("Predictions", "misses_per_s", "too late", "/s", _rate("sage:prediction_misses_total")),
    Row("Scheduler", "plan_s", "time per plan", "ms", _pass_s),
    Row("Scheduler", "policy_errors_per_s", "failures of the policy", "/s",
        _rate("sage:policy_errors_total")),
)  # fmt: skip


def text_of(value: float | None, unit: str) -> str:
    """Return a figure for people, with its unit; "–" for None."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "ms":
        value *= 1e3
    if not unit:
        return f"{value:.0f}"
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def found(window: Window) -> dict[str, float | None]:
    """Return all figures by name, in seconds and shares; None if the server does not report one."""
    values = {row.name: row.value(window) for row in ROWS}
    return {name: None if math.isnan(value) else value for name, value in values.items()}
