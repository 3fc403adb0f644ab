"""What a scheduler says of itself on /metrics, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import metrics
from patches.scheduler.metrics import SchedulerMetrics
from patches.scheduler.preemption import Preemption
from patches.scheduler.state import SchedulerState
from patches.series import SERIES
from sage_sched.app.config import PreemptionConfig, SageConfig
from sage_sched.plan import PreemptionMode
from tests.checks.full_server import stand_in_scheduler
from tests.patches.scheduler.test_state import request

# Of a clock that stands still, however slow the host is.
NOW_S = 1000.0


class Said:
    """In the place of Series: what was said last."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        assert set(labels) == set(SERIES[name].labels)
        self.values[" ".join([name, *labels.values()])] = value

    count = set


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(monotonic=lambda: NOW_S, perf_counter=lambda: NOW_S)
    monkeypatch.setattr(metrics, "time", clock)
    one = stand_in_scheduler(lambda: 10_000)
    context = SimpleNamespace(current_scheduler_metrics_enabled=True, collector=None)
    one.metrics_collector_context = context
    one.sage = SchedulerState(one, SageConfig.parse({"preemption": {"enabled": False}}))
    return one


def said(scheduler: Any) -> dict[str, float]:
    metrics, series = SchedulerMetrics(scheduler), Said()
    metrics._series = series  # type: ignore[assignment]
    metrics.look()
    return series.values


def arrive(scheduler: Any, waited_s: float, length: int) -> Any:
    req = request([length] * 9)
    req.time_stats = SimpleNamespace(wait_queue_entry_time=NOW_S - waited_s)
    scheduler.sage.jobs.arrived(req)
    return req


def test_waits_and_backlog_are_those_of_now(scheduler: Any) -> None:
    assert said(scheduler)["oldest_wait_seconds"] == said(scheduler)["backlog_seconds"] == 0.0
    scheduler.waiting_queue = [arrive(scheduler, 30.0, 10), arrive(scheduler, 10.0, 900)]
    found = said(scheduler)
    assert found["oldest_wait_seconds"] == 30.0
    assert found["mean_wait_seconds"] == 20.0
    step_s = scheduler.sage.calibration.step_time.decode_base_s
    assert found["backlog_seconds"] >= 899 * step_s
    assert found["policy_info sage"] == 1.0
    assert found["step_time_seconds decode_base"] == step_s


def test_the_rank_that_speaks_goes_on_as_the_others_do(scheduler: Any) -> None:
    running = arrive(scheduler, 1.0, 50)
    running.output_ids.extend([1] * 30)
    scheduler.running_batch.reqs = [running]
    running.sage.job.watch = watch = {}
    before = repr(running.sage.job)
    left = said(scheduler)["backlog_seconds"]
    assert repr(running.sage.job) == before
    assert not watch
    running.output_ids.extend([1] * 15)
    assert said(scheduler)["backlog_seconds"] < left


def test_what_goes_wrong_with_a_series_ends_the_series_alone(
    scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = SchedulerMetrics(scheduler)
    metrics._series = object()  # type: ignore[assignment]
    for _ in range(3):
        metrics.look()
    assert caplog.text.count("no longer brought up to date") == 1


def test_a_server_without_metrics_says_nothing(scheduler: Any) -> None:
    scheduler.metrics_collector_context.current_scheduler_metrics_enabled = False
    metrics = SchedulerMetrics(scheduler)
    metrics.look()
    assert metrics.series() is None


def test_counts_go_on_where_they_were_when_nobody_may_leave_any_more(scheduler: Any) -> None:
    state = scheduler.sage
    state.preemption = Preemption(scheduler, PreemptionConfig())
    state.last_preemption = state.preemption
    state.preemption.num_yields[True, PreemptionMode.SWAP] = 3
    assert said(scheduler)["yields_total out_of_memory swap"] == 3
    # Under one of SGLang's policies, to which it was switched. Back from there, the three would
    # count once more.
    state.preemption = None
    assert said(scheduler)["yields_total out_of_memory swap"] == 3
