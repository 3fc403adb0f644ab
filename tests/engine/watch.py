"""Watches a server's /metrics for tests: Prometheus if it is on the PATH, else a reader of the
expressions in docs/monitoring/alerts.yaml."""

from __future__ import annotations

import operator
import re
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import yaml

from bench.engines.server.server import Server
from tests.engine.serving import wait_until

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


class Watch(ABC):
    """Of one server."""

    @abstractmethod
    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""

    def wait_for(self, alert: str) -> None:
        wait_until(lambda: alert in self.firing())


@contextmanager
def watching(server: Server, folder: Path) -> Iterator[Watch]:
    if (program := shutil.which("prometheus")) is None:
        yield _Reader(server)
    else:
        with _prometheus(program, server, folder) as watch:
            yield watch


class _Prometheus(Watch):
    def __init__(self, url: str) -> None:
        self._url = url

    def firing(self) -> set[str]:
        alerts = self.asked("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def asked(self, what: str, **parameters: str) -> Any:
        answer = requests.get(f"{self._url}/api/v1/{what}", params=parameters, timeout=60)
        answer.raise_for_status()
        return answer.json()["data"]


@contextmanager
def _prometheus(program: str, server: Server, folder: Path) -> Iterator[_Prometheus]:
    """A real Prometheus with our configuration, at shorter intervals."""
    rules = (MONITORING / "alerts.yaml").read_text()
    rules = re.sub(r"for: \w+", "for: 0s", rules).replace("[5m]", f"[{_LOOKS_BACK_S}s]")
    (folder / "alerts.yaml").write_text(rules)
    config = (MONITORING / "prometheus.yaml").read_text()
    config = re.sub(r"_interval: \w+", "_interval: 1s", config)
    assert "127.0.0.1:30000" in config
    (folder / "prometheus.yaml").write_text(
        config.replace("127.0.0.1:30000", server.url.removeprefix("http://"))
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            watch = _Prometheus(f"http://{address}")
            wait_until(lambda: _is_scraped(watch))
            yield watch
        finally:
            process.terminate()
            process.wait(60)


def _is_scraped(watch: _Prometheus) -> bool:
    try:
        return bool(watch.asked("query", query="sage:policy_info == 1")["result"])
    except requests.RequestException:
        return False


class _Reader(Watch):
    """Reads only the forms of our expressions: a series, its rate or its increase, compared with a
    number or with a share of another's increase; and several of these joined."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._seen: list[tuple[float, dict[str, float]]] = []

    def firing(self) -> set[str]:
        now: dict[str, float] = {}
        for name, _, value in samples(self._server):
            now[name] = now.get(name, 0.0) + value
        self._seen.append((time.monotonic(), now))
        return {alert["alert"] for alert in ALERTS if self._fires(alert["expr"])}

    def _fires(self, expression: str) -> bool:
        return all(self._holds(part) for part in expression.split(" and "))

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
