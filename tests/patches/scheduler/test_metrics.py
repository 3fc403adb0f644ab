from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import metrics
from patches.scheduler.metrics import SchedulerMetrics
from patches.series import SERIES
from tests.patches.schedulers import Server, make_request

# By a clock that stands still, however slow the host is.
NOW_S = 1000.0


class Reported:
    def __init__(self, labels: object) -> None:
        self.values: dict[str, float] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        assert set(labels) == set(SERIES[name].labels)
        self.values[" ".join([name, *labels.values()])] = value

    count = set


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    clock = SimpleNamespace(monotonic=lambda: NOW_S, perf_counter=lambda: NOW_S)
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(metrics, "Series", Reported)
    context = SimpleNamespace(
        current_scheduler_metrics_enabled=True, collector=SimpleNamespace(labels={})
    )
    return Server(metrics_collector_context=context)


def reported(server: Server) -> dict[str, float]:
    found: Any = SchedulerMetrics(server.scheduler)
    found.polled()
    values: dict[str, float] = found.series().values
    return values


def test_the_rank_that_reports_goes_on_as_the_others_do(server: Server) -> None:
    (running,) = server.arrive(make_request([50] * 9, answer_tokens=30))
    server.scheduler.running_batch.reqs = [running]
    running.sage.job.watch = watch = {}
    before = repr(running.sage.job)
    left = reported(server)["backlog_seconds"]
    assert repr(running.sage.job) == before
    assert not watch
    running.output_ids.extend([1] * 15)
    assert reported(server)["backlog_seconds"] < left


def test_an_error_ends_the_series_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "Series", lambda labels: object())
    for _ in range(3):
        server.state.listeners.polled()
    assert caplog.text.count("no longer brought up to date") == 1
    # One without metrics reports nothing.
    found = SchedulerMetrics(Server().scheduler)
    found.polled()
    assert found.series() is None
