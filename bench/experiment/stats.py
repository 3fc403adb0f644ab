"""Computes medians over seeds, and ratios paired by seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.experiment.records import Record


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio to the reference on the same requests, and its range: over seeds, or the interval of
    `sage-sched whatif`. Of several seeds the value is the median."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ordered(values: Iterable[str]) -> list[str]:
    """Return the distinct values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def of_arm(records: Iterable[Record], load: str, arm: str) -> list[Record]:
    """Return the records of one load and arm."""
    return [record for record in records if (record.load, record.arm) == (load, arm)]


def median(records: Sequence[Record], metric: str) -> float:
    """Return the median over seeds; NaN if no record has the metric."""
    found = [record.metrics[metric] for record in records if metric in record.metrics]
    return float(np.median(found)) if found else float("nan")


def ratio(ours: Sequence[Record], theirs: Sequence[Record], metric: str) -> Ratio | None:
    """Return the ratio paired by seed; None if there is no pair, or the reference is 0."""
    of_seed = {record.seed: record.metrics.get(metric, 0.0) for record in theirs}
    ratios = [
        record.metrics[metric] / of_seed[record.seed]
        for record in ours
        if of_seed.get(record.seed) and metric in record.metrics
    ]
    if not ratios:
        return None
    return Ratio(float(np.median(ratios)), float(min(ratios)), float(max(ratios)))


def against(ours: str, ours_s: float, theirs: str, theirs_s: float) -> str:
    """Return a phrase that says which policy finished answers sooner, without a full stop."""
    change = 1 - ours_s / theirs_s
    by = f"{abs(change):.0%}".replace("%", " %")
    how = "no sooner and no later" if by == "0 %" else f"{by} {'sooner' if change > 0 else 'later'}"
    return (
        f"{ours} finished answers in {seconds(ours_s)} on average, {theirs} in "
        f"{seconds(theirs_s)}: {how}"
    )


def seconds(value_s: float) -> str:
    """Return a time to two digits or more."""
    return f"{value_s:.0f} s" if value_s >= 10 else f"{value_s:.2g} s"


def headline(records: Sequence[Record]) -> str:
    """Return the result of `sage` under the last load, compared with the first arm and the best
    of the others; "" if it was not compared."""
    load, first = ordered(record.load for record in records)[-1], records[0].arm
    mean_s = {
        arm: found / 1e3
        for arm in ordered(record.arm for record in records)
        if (found := median(of_arm(records, load, arm), "mean_e2e_latency_ms")) == found
    }
    if first == "sage" or not {"sage", first} <= set(mean_s):
        return ""
    ours_s = mean_s.pop("sage")
    best = min(mean_s, key=lambda arm: mean_s[arm])
    sentence = against("`sage`", ours_s, f"`{first}`", mean_s[first])
    if best == first:
        return f"{sentence}."
    return f"{sentence}. The best of the others was `{best}`, in {seconds(mean_s[best])}."
