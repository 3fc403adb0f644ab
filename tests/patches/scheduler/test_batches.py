"""Batches in a scheduler of SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from patches.carrier import encode_batch
from patches.scheduler.view import ServerKv
from sage_sched.job import BEHIND, BatchPart
from tests.patches.scheduler.test_overload import refuses
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, make_request

SLOW = {"step_time": {"decode_base_ms": 1000.0}}


def part_of_batch(done_in_s: float, rid: str = "a") -> Any:
    return make_request([10], rid=rid, carried=encode_batch(BatchPart("b", 9, done_in_s)))


def test_a_prediction_that_fails_refuses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(schedule_policy="sage", sections=SLOW)
    (req,) = server.arrive(part_of_batch(2.0))
    monkeypatch.setattr(server.state.core.limits.batches, "refuses", fail)
    assert not refuses(server, req)
    assert server.state.stats()["num_policy_errors"] == 1


@pytest.mark.parametrize(("mode", "num_prompts"), [("null", 9), ("decode", 0)])
def test_prompts_are_no_work_of_a_decode_server(mode: str, num_prompts: int) -> None:
    server = Server(schedule_policy="sage", sections=SLOW, disaggregation_mode=mode)
    (req,) = server.arrive(part_of_batch(900.0))
    batch = server.state.core.limits.batches.of(req.sage.job)
    assert batch is not None
    step_time, num_tokens = server.state.server.step_time, req.sage.job.input_tokens
    prompts_s = batch.prompts_s(server.state.core.now_s, step_time)
    assert prompts_s == pytest.approx(num_prompts * step_time.prompt_s(0, num_tokens))


@pytest.mark.parametrize(
    ("sections", "policy", "done_in_s", "is_refused"),
    [
        (SLOW, "sage", 2.0, True),
        (SLOW, "sage", 900.0, False),
        ({}, "sage", 1e-3, False),  # before step times are learned
        (SLOW, "fcfs", 2.0, False),
    ],
)
def test_a_batch_is_refused_as_it_comes(
    sections: Any, policy: str, done_in_s: float, is_refused: bool
) -> None:
    server = Server(schedule_policy=policy, sections=sections)
    aborts: list[Any] = []
    server.scheduler.send_abort_output = lambda abort, req: aborts.append(abort)
    (req,) = server.arrive(part_of_batch(done_in_s))
    assert refuses(server, req) == is_refused
    assert [abort.finished_reason["status_code"] for abort in aborts] == [400] * is_refused
    reports = server.state.stats().get("batches", [])
    assert [report["batch"] for report in reports] == ["b"] * (not is_refused)
    if is_refused:
        assert "2.0 s are left" in req.sage.refusal
    else:
        assert (reports[0]["num_requests"], reports[0]["num_arrived"]) == (9, 1)
        assert req.sage.job.level == BEHIND


def test_only_the_first_request_of_a_batch_is_looked_up_as_it_comes() -> None:
    server = Server(schedule_policy="sage", sections=SLOW)
    for rid, is_first in (("a", True), ("b", False)):
        (req,) = server.arrive(part_of_batch(900.0, rid))
        refuses(server, req)
        assert req.sage.job.was_looked_up == is_first


def test_batch_and_overload_limits_share_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Any] = []
    monkeypatch.setattr(ServerKv, "cached", lambda kv, job: (looked_up.append(job), (0, 0))[1])
    protected = {"overload": {"enabled": True, "max_queued_tokens": 900}}
    server = Server(schedule_policy="sage", sections=SLOW | protected)
    (req,) = server.arrive(part_of_batch(900.0))
    assert not refuses(server, req)
    assert looked_up == [req.sage.job]
