"""Reads the expressions of docs/monitoring/alerts.yaml on a server's /metrics."""

from __future__ import annotations

import operator
import re
import time
from pathlib import Path

import requests
import yaml

from bench.engines.server.server import Server

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
# Replaces the five minutes that the alerts' expressions look back.
_LOOKS_BACK_S = 30
Sample = tuple[str, dict[str, str], float]


def samples(server: Server) -> list[Sample]:
    """Name, labels and value of each sample that it exposes."""
    text = requests.get(server.url + "/metrics", timeout=60).text
    return [
        (name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value))
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.M)
    ]


class Watch:
    """The alerts of one server.

    Only the forms of our expressions are read: a series, its rate or its increase, compared with a
    number or with a share of another's increase; and several of these joined.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._seen: list[tuple[float, dict[str, float]]] = []

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        now: dict[str, float] = {}
        for name, _, value in samples(self._server):
            now[name] = now.get(name, 0.0) + value
        self._seen.append((time.monotonic(), now))
        return {
            alert["alert"]
            for alert in ALERTS
            if all(map(self._holds, alert["expr"].split(" and ")))
        }

    def _holds(self, expression: str) -> bool:
        terms = re.fullmatch(
            r"(?:sum by \([\w, ]+\) \()?(?P<of>rate|increase)?\(?(?P<series>sage:\w+)[^<>=]*"
            r" (?P<is>[<>=]+) (?P<limit>[\d.]+)"
            r"(?: \* sum by \([\w, ]+\) \(increase\((?P<whole>sage:\w+)\[5m\]\)\))?",
            expression,
        )
        assert terms is not None, expression
        value = self._value(terms["series"], terms["of"])
        if value is None:
            return False
        limit = float(terms["limit"])
        if terms["whole"]:
            limit *= self._value(terms["whole"], "increase") or 0.0
        holds = {">": operator.gt, "<": operator.lt, "==": operator.eq, ">=": operator.ge}
        return bool(holds[terms["is"]](value, limit))

    def _value(self, series: str, of: str | None) -> float | None:
        now_s, now = self._seen[-1]
        if of is None or series not in now:
            return now.get(series)
        # Of two looks at least, however far apart they are on a slow host.
        old = [look for look in self._seen[:-1] if look[0] <= now_s - _LOOKS_BACK_S]
        began_s, began = old[-1] if old else self._seen[0]
        increase = now[series] - began.get(series, now[series])
        return increase if of == "increase" else increase / max(1e-9, now_s - began_s)
