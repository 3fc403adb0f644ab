"""Reads a server's /metrics, and computes rates and quantiles between two readings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from sage_sched.errors import UserError


@dataclass(frozen=True, slots=True)
class Reading:
    """The samples of /metrics at one moment.

    at_s: when, on any clock. samples: for each name, the labels and the value of each sample.
    """

    at_s: float
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    @classmethod
    def parse(cls, text: str, at_s: float) -> Self:
        """Parse Prometheus' text format. Raises UserError if it is something else."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:
            raise UserError(
                f"the server's /metrics is not in Prometheus' format: {error}"
            ) from error
        return cls(at_s, samples)

    def sum(self, name: str) -> float:
        """Return the sum over all label sets; NaN if there is no such series."""
        found = [value for _, value in self.samples.get(name, []) if not math.isnan(value)]
        return sum(found) if found else math.nan

    def max(self, name: str) -> float:
        """Return the largest value over all label sets; NaN if there is no such series."""
        found = [value for _, value in self.samples.get(name, []) if not math.isnan(value)]
        return max(found, default=math.nan)

    def label(self, name: str, label: str) -> str:
        """Return this label of the series whose value is 1; "" if there is none."""
        return next((at[label] for at, value in self.samples.get(name, []) if value == 1), "")

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper edge, over all label sets."""
        counts: dict[float, float] = {}
        for labels, value in self.samples.get(f"{name}_bucket", []):
            edge = float(labels["le"])
            counts[edge] = counts.get(edge, 0.0) + value
        return dict(sorted(counts.items()))


@dataclass(frozen=True, slots=True)
class Window:
    """Two readings of one server. Its rates and quantiles are those of the time between them."""

    first: Reading
    last: Reading

    def rate(self, name: str) -> float:
        """Return the growth of a counter per second; NaN if it is missing or no time has passed.
        After a restart it counts from 0."""
        seconds = self.last.at_s - self.first.at_s
        return self.growth(name) / seconds if seconds > 0 else math.nan

    def growth(self, name: str) -> float:
        """Return the growth of a counter."""
        before, after = self.first.sum(name), self.last.sum(name)
        return after if math.isnan(before) or after < before else after - before

    def quantile(self, name: str, q: float) -> float:
        """Return a quantile of a histogram, linear within its bucket, as Prometheus'
        histogram_quantile. NaN if nothing was observed."""
        counts = self._counts(name)
        total = counts.get(math.inf, 0.0)
        if not total > 0:
            return math.nan
        below_edge = below = 0.0
        for edge, count in counts.items():
            if count >= q * total:
                if edge == math.inf:
                    return below_edge
                return below_edge + (edge - below_edge) * (q * total - below) / (count - below)
            below_edge, below = edge, count
        return below_edge

    def share_within(self, name: str, limit: float) -> float:
        """Return the share of observations up to a limit, or up to the largest edge below it. NaN
        if nothing was observed."""
        counts = self._counts(name)
        total = counts.get(math.inf, 0.0)
        within = [count for edge, count in counts.items() if edge <= limit]
        return max(within, default=0.0) / total if total > 0 else math.nan

    def _counts(self, name: str) -> dict[float, float]:
        before, after = self.first.buckets(name), self.last.buckets(name)
        if any(count < before.get(edge, 0.0) for edge, count in after.items()):  # a restart
            return after
        return {edge: count - before.get(edge, 0.0) for edge, count in after.items()}
