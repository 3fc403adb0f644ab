from __future__ import annotations

from types import SimpleNamespace

import pytest

from patches.scheduler import metrics
from patches.scheduler.metrics import SchedulerMetrics
from tests.patches.schedulers import Server


def test_an_error_ends_the_series_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = iter(range(0, 100, 10))
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=now_s.__next__))
    monkeypatch.setattr(metrics, "Series", lambda labels: object())
    context = SimpleNamespace(
        current_scheduler_metrics_enabled=True, collector=SimpleNamespace(labels={})
    )
    server = Server(metrics_collector_context=context)
    for _ in range(3):
        server.state.listeners.polled()
    assert caplog.text.count("no longer brought up to date") == 1
    # One without metrics reports nothing.
    found = SchedulerMetrics(Server().scheduler)
    found.polled()
    assert found.series() is None
