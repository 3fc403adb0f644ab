"""Reads the expressions of docs/monitoring/alerts.yaml on a server's /metrics."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.engines.server.server import Server

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
# Replaces the five minutes that the alerts' expressions look back.
_LOOKS_BACK_S = 30


def samples(server: Server) -> list[Sample]:
    """Return the samples at its /metrics."""
    text = requests.get(server.url + "/metrics", timeout=1200).text
    return [each for family in text_string_to_metric_families(text) for each in family.samples]


class Watch:
    """The alerts of one server. Their expressions are read as Python's, in which a series is a
    call. A missing series is NaN."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._seen: list[tuple[float, dict[str, float]]] = []
        self._greatest: dict[str, float] = {}

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        now: dict[str, float] = {}
        self._greatest = {}
        for sample in samples(self._server):
            now[sample.name] = now.get(sample.name, 0.0) + sample.value
            self._greatest[sample.name] = max(self._greatest.get(sample.name, 0.0), sample.value)
        self._seen.append((time.monotonic(), now))
        return {alert["alert"] for alert in ALERTS if self._holds(alert["expr"])}

    def _holds(self, expression: str) -> bool:
        code = re.sub(r"max without \(\w+\) \((sage:\w+)\)", r'greatest("\1")', expression)
        code = re.sub(r"sum by \([\w, ]+\) ", "", code)
        code = re.sub(r"(?<![(\"])sage:\w+", r'latest("\g<0>")', code)
        code = re.sub(r"\((sage:\w+)\[5m\]\)", r'("\1")', code)
        functions = {
            "latest": self._latest,
            "greatest": lambda series: self._greatest.get(series, math.nan),
            "increase": self._increase,
            "rate": self._rate,
        }
        return bool(eval(code, functions))

    def _latest(self, series: str) -> float:
        return self._seen[-1][1].get(series, math.nan)

    def _increase(self, series: str) -> float:
        latest = self._latest(series)
        return latest - self._before()[1].get(series, latest)

    def _rate(self, series: str) -> float:
        return self._increase(series) / max(1e-9, self._seen[-1][0] - self._before()[0])

    def _before(self) -> tuple[float, dict[str, float]]:
        """Return the newest earlier look that is old enough, or else the oldest. On a slow host
        looks may be far apart."""
        since_s = self._seen[-1][0] - _LOOKS_BACK_S
        return next((look for look in self._seen[-2::-1] if look[0] <= since_s), self._seen[0])
