from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import metrics
from patches.scheduler.metrics import SchedulerMetrics
from patches.scheduler.preemption import Preemption
from patches.series import SERIES
from sage_sched.app.config import PreemptionConfig
from sage_sched.plan import PreemptionMode
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


def test_waits_and_backlog_are_those_of_now(server: Server) -> None:
    found = reported(server)
    assert found["oldest_wait_seconds"] == found["backlog_seconds"] == 0.0
    reqs = server.queue(make_request([10] * 9), make_request([900] * 9))
    for req, waited_s in zip(reqs, (30.0, 10.0), strict=True):
        req.time_stats.wait_queue_entry_time = NOW_S - waited_s
    found = reported(server)
    assert (found["oldest_wait_seconds"], found["mean_wait_seconds"]) == (30.0, 20.0)
    step_s = server.state.calibration.step_time.decode_base_s
    assert found["step_time_seconds decode_base"] == step_s
    assert found["backlog_seconds"] >= 899 * step_s
    # A prompt that is being chunked counts too.
    server.scheduler.chunked_req = server.scheduler.waiting_queue.pop()
    assert reported(server)["backlog_seconds"] == found["backlog_seconds"]


def test_the_policy_before_is_not_reported_any_more(server: Server) -> None:
    found: Any = SchedulerMetrics(server.scheduler)
    for policy in ("sage", "ssjf"):
        server.state.settings = server.state.settings.changed({"schedule_policy": policy})
        found._due_s = 0.0
        found.polled()
    values = found.series().values
    assert (values["policy_info sage"], values["policy_info ssjf"]) == (0.0, 1.0)


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


def test_counts_stay_while_no_request_may_leave(server: Server) -> None:
    state, preemption = server.state, Preemption(server.scheduler, PreemptionConfig())
    state.preemption = state.last_preemption = preemption
    preemption.num_preemptions[True, PreemptionMode.SWAP] = 3
    found = reported(server)
    assert (found["preemptions_total out_of_memory swap"], found["host_used_ratio"]) == (3, 0.0)
    # Under one of SGLang's policies, to which it was switched. Back from there, the three would
    # count once more.
    state.preemption = None
    assert reported(server)["preemptions_total out_of_memory swap"] == 3
