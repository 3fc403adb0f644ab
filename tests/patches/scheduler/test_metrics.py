from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import metrics
from patches.scheduler.metrics import SchedulerMetrics, left_s
from patches.scheduler.why_waiting import by_reason
from tests.patches.schedulers import Server, StandInBatch, make_request


def slots(number: int) -> dict[str, Any]:
    return {"get_num_allocatable_reqs": lambda num_running, running_batch: number}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(0, 1000, 2))
    times = SimpleNamespace(monotonic=now_s.__next__, perf_counter=lambda: 0.0)
    monkeypatch.setattr(metrics, "time", times)


def test_an_error_ends_the_series_alone(
    clock: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize(
    ("reason", "attributes"),
    [
        ("adapter", slots(0)),
        ("slots", {"free_tokens": 20, **slots(0)}),
        ("memory", {"free_tokens": 20, "chunked_req": True, **slots(1)}),
        ("long_prompt", {"chunked_req": True, **slots(1)}),
        ("held", slots(1)),
        ("memory", {"free_tokens": 20, "disaggregation_mode": "decode"}),
        ("held", {"disaggregation_mode": "decode"}),
    ],
)
def test_a_request_waits_for_the_first_reason_that_applies(
    reason: str, attributes: dict[str, Any]
) -> None:
    server = Server(**attributes)
    server.queue(waiting := make_request(prompt=20))
    if "disaggregation_mode" in attributes:
        entry = SimpleNamespace(req=waiting, waiting_for_input=True)
        server.scheduler.disagg_decode_prealloc_queue.queue = [entry]
        server.scheduler.req_to_token_pool = SimpleNamespace(available_size=lambda: 1)
        server.scheduler.waiting_queue.clear()
    server.scheduler.running_batch = StandInBatch(server.arrive(make_request()))
    if server.scheduler.chunked_req:
        [server.scheduler.chunked_req] = server.arrive(make_request())
    if reason == "adapter":
        server.scheduler.enable_lora, server.scheduler.lora_drainer = True, None
        manager = SimpleNamespace(validate_lora_batch=lambda names: len(names) < 2)
        runner = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
        server.scheduler.tp_worker, waiting.sage.job.adapter = runner, "another"
    found = {reason: reqs for reason, reqs in by_reason(server.scheduler).items() if reqs}
    assert found == {reason: [waiting]}


@pytest.mark.parametrize(
    ("waits", "free_tokens", "num_slots", "binds"),
    [(1, 200_000, 0, 1), (1, 199_999, 0, 0), (1, 200_000, 1, 0), (0, 200_000, 0, 0)],
)
def test_slots_that_bind_while_memory_is_free_are_logged_once(
    waits: int, free_tokens: int, num_slots: int, binds: int, clock: None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    server = Server(free_tokens=free_tokens, **slots(num_slots))
    server.queue(*[make_request()] * waits)
    told = []
    for _ in range(40):
        server.state.listeners.polled()
        told.append((server.stats()["slots_bind"], caplog.text.count("--max-running-requests")))
    assert told == [(False, 0)] * 29 + [(bool(binds), binds)] * 11


def test_a_report_tells_no_queue_that_a_running_request_has_grown() -> None:
    server = Server(new_token_ratio_tracker=SimpleNamespace(current=0.5))
    (req,) = server.arrive(make_request(answer_tokens=3))
    server.scheduler.running_batch = StandInBatch([req])
    changed = req.sage.job.watch = {}
    assert left_s(server.scheduler)[1] == 1
    assert not changed
    assert req.sage.job.generated_tokens == 0
