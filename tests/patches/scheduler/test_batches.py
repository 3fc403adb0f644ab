"""Batches in a scheduler of SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from patches.carrier import encode_batch
from sage_sched.job import BEHIND, BatchPart
from tests.patches.scheduler.test_overload import refuses
from tests.patches.schedulers import Server, make_request

SLOW = {"step_time": {"decode_base_ms": 1000.0}}


def part_of_batch(done_in_s: float, rid: str = "a") -> Any:
    return make_request([10], rid=rid, carried=encode_batch(BatchPart("b", 9, done_in_s)))


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
