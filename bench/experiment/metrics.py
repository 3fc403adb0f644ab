"""A run in numbers."""

from __future__ import annotations

from collections.abc import Iterable

from bench.engines.simulator.result import Served
from bench.experiment.records import of_metrics


def measured(served: Served, columns: Iterable[str]) -> dict[str, float]:
    """What a record of the run keeps. A column is a metric of Served.metrics, or of some classes of
    requests alone: `p99_ttft_ms:LS`, `mean_waited_per_token_ms:1+2`."""
    metrics = {**served.metrics(), **served.session_metrics()}
    attained = served.attainment()
    metrics |= {name: value for name, value in attained.items() if isinstance(value, float | int)}
    if "tdg_ratio" in metrics:
        metrics["missed_tdg"] = 1 - metrics["tdg_ratio"]
    for column in columns:
        base, _, classes = column.partition(":")
        if classes and set(wanted := classes.split("+")) & set(served.class_names):
            metrics[column] = served.only(wanted).metrics()[base]
    return of_metrics(metrics, columns)
