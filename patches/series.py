"""Our series on /metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

_LATENCIES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class _Kind(NamedTuple):
    kind: str
    what: str  # shown in docs/monitoring.md
    labels: tuple[str, ...] = ()  # in addition to SGLang's


# Names end in their unit; counters end in _total.
SERIES: Mapping[str, _Kind] = {
    # From the schedulers.
    "policy_info": _Kind("gauge", "1 for the policy in force, 0 for earlier ones.", ("policy",)),
    "switches_total": _Kind("counter", "Changes of settings while the server runs."),
    "waiting_requests": _Kind("gauge", "Requests that wait now, by what they lack.", ("reason",)),
    "oldest_wait_seconds": _Kind(
        "gauge", "Longest of their waits, since they came or were preempted.", ("reason",)
    ),
    "mean_wait_seconds": _Kind("gauge", "Mean wait of the waiting requests."),
    "backlog_seconds": _Kind(
        "gauge",
        "Predicted time until nine in ten of the present requests are done; a rough estimate.",
    ),
    "headroom_steps": _Kind("gauge", "Decode steps for which memory is kept free."),
    "host_used_ratio": _Kind("gauge", "Used share of the host memory for KV."),
    "swapped_requests": _Kind("gauge", "Requests with their KV in host memory."),
    "preemptions_total": _Kind("counter", "Running requests that left the GPU.", ("reason", "way")),
    "moved_bytes_total": _Kind("counter", "KV moved to host memory and back, by this rank."),
    "moved_seconds_total": _Kind("counter", "Time for which these moves blocked the scheduler."),
    "recomputed_tokens_total": _Kind(
        "counter", "Tokens computed again for answers that had begun."
    ),
    "policy_errors_total": _Kind("counter", "Failures of the policy."),
    "unpredicted_requests_total": _Kind("counter", "Requests without a predicted length."),
    "refused_total": _Kind(
        "counter", "Requests refused for a predicted time or max_queued_tokens.", ("metric",)
    ),
    "predicted_time_ratio": _Kind(
        "gauge", "Real times of the latest 500 requests, divided by predicted ones.", ("metric",)
    ),
    "refused_sample_good_ratio": _Kind(
        "gauge",
        "Share of the latest 50 requests, predicted to be late but admitted, that were in time.",
    ),
    "refusing_trusted": _Kind(
        "gauge", "0 while nothing is refused, as predicted times are far too long."
    ),
    "passes_total": _Kind("counter", "Planned scheduling passes."),
    "pass_seconds_total": _Kind("counter", "Time that planning took."),
    "step_time_seconds": _Kind("gauge", "Coefficients of the step times in use.", ("coefficient",)),
    "step_time_error_ratio": _Kind(
        "gauge", "Mean relative error of the step times on the latest 2,048 steps.", ("kind",)
    ),
    "token_gap_seconds": _Kind(
        "gauge",
        "Time between two tokens of a request, in the last minute or two.",
        ("request", "statistic"),
    ),
    "slo_requests": _Kind("gauge", "Requests with a deadline.", ("slo_class",)),
    "slo_good_requests": _Kind("gauge", "Requests that kept all their deadlines.", ("slo_class",)),
    "slo_attainment": _Kind(
        "gauge", "Share of requests that kept their deadline.", ("slo_class", "metric")
    ),
    "tdg_ratio": _Kind(
        "gauge", "Weight of tokens on time, divided by the weight of all tokens.", ("slo_class",)
    ),
    # From the HTTP processes.
    "predictions_total": _Kind("counter", "Predictions, by the records they use.", ("source",)),
    "prediction_latency_seconds": _Kind(
        "histogram", "Time that requests waited for their predictions."
    ),
    "prediction_misses_total": _Kind(
        "counter", "Predictions that came after predictor.deadline_ms, or never."
    ),
    "prediction_scored_answers": _Kind(
        "gauge",
        "Answers, at most 500, in the next two series, which are missing or NaN below 50.",
    ),
    "prediction_coverage_ratio": _Kind(
        "gauge", "Share of these answers within the predicted central 80 % of lengths."
    ),
    "prediction_crps_gain_ratio": _Kind(
        "gauge",
        "Share of the error (CRPS) that predictions save over one distribution for all.",
    ),
    "predictor_up": _Kind("gauge", "1 if the prediction worker lives."),
    "predictor_widened": _Kind(
        "gauge", "1 if one distribution replaces predictions, as they were worse."
    ),
    "predictor_records": _Kind("gauge", "Answers in the history."),
    "predictor_unwritten_records": _Kind("gauge", "Answers that are not on disk yet."),
}


class Series:
    """The series of one process."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        """labels: SGLang's own labels of this process, which all series carry."""
        self._labels = {name: str(value) for name, value in labels.items()}
        self._totals: dict[tuple[str, ...], float] = {}
        self._set: set[str] = set()

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._set.add(name)
        self._of(name, labels).set(value)

    def unset(self, name: str) -> None:
        """Mark a gauge without labels of its own as having no value. If it had a value it becomes
        NaN, because the files of several processes keep a series forever. No alert fires on NaN."""
        if name in self._set:
            self._of(name, {}).set(math.nan)

    def count(self, name: str, total: float, **labels: str) -> None:
        """Set a counter to its total since the process started."""
        key = (name, *labels.values())
        self._of(name, labels).inc(max(0.0, total - self._totals.get(key, 0.0)))
        self._totals[key] = total

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        self._of(name, labels).observe(value)

    def _of(self, name: str, labels: Mapping[str, str]) -> Any:
        series = _registered(name, tuple(self._labels))
        return series.labels(**self._labels, **labels)


@cache
def _registered(name: str, labels: tuple[str, ...]) -> Any:
    """Return a series, made at its first use, because SGLang has to set up prometheus_client before
    it is imported."""
    from prometheus_client import Counter, Gauge, Histogram

    kind, what, own = SERIES[name]
    all_labels = [*labels, *own]
    if kind == "counter":
        return Counter(f"sage:{name}", what, all_labels)
    if kind == "histogram":
        return Histogram(f"sage:{name}", what, all_labels, buckets=_LATENCIES_S)
    return Gauge(f"sage:{name}", what, all_labels, multiprocess_mode="mostrecent")
