"""The trace of requests, as lines of a file and as events of SGLang's spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel

from patches.scheduler.trace import trace_of
from sage_sched.plan import Admit, Preempt, PreemptionMode
from tests.engine.serving import wait_until
from tests.patches.schedulers import Server, StandInBatch, make_bare_scheduler, make_request

EVENTS = ["came", "preempt", "starts", "ends"]


def traced(server: Server) -> tuple[Any, Any, list[tuple[str, Any]]]:
    """Two requests, of which the first yields to the second; the second finds no room. Also the
    first's spans."""
    spans: list[tuple[str, Any]] = []
    one, two = make_request([20] * 9, 7, rid="one"), make_request([20] * 9, 7, rid="two")
    for req in (one, two):
        note = lambda name, level, attrs, rid=req.rid: spans.append((f"{rid} {name}", attrs))  # noqa: E731
        req.time_stats.trace_ctx.trace_event = note
    server.arrive(one, two)
    job, other, listeners = one.sage.job, two.sage.job, server.state.listeners
    actions = [Preempt(job, PreemptionMode.SWAP, "behind", other), Admit(other, "room")]
    listeners.carried_out(actions, {job: one, other: two}, [two])
    one.sage.waits.since_s, one.sage.waits.num_before = one.sage.waits.came_s - 2.0, 3
    listeners.ran(StandInBatch([one], prefills=True))
    server.state.end(one, was_aborted=False)
    server.state.end(two, was_aborted=True)
    return one, two, spans


def test_spans_report_predictions_preemptions_and_waits() -> None:
    _, _, spans = traced(Server(enable_trace=True))
    found = dict(spans)
    assert [name for name, _ in spans if name.startswith("one")] == [
        f"one sage.{event}" for event in EVENTS
    ]
    assert (found["one sage.came"]["p50_tokens"], found["one sage.came"]["source"]) == (
        20, "history",
    )  # fmt: skip
    assert found["one sage.preempt"] == {
        "reason": "behind",
        "way": PreemptionMode.SWAP.value,
        "to": "two",
    }
    assert found["one sage.starts"]["waited_s"] >= 2.0
    assert found["one sage.ends"] == {"tokens": 0, "why": "done"}
    assert found["two sage.stays"] == {"reason": "there was no room after all"}
    assert found["two sage.ends"]["why"] == "aborted"


def test_a_file_reports_the_same_by_request(tmp_path: Path) -> None:
    scheduler = make_bare_scheduler()
    scheduler.server_args._sage_trace = str(tmp_path / "trace")
    server = Server(scheduler)
    traced(server)
    wait_until(lambda: server.stats()["trace"]["num_written"] == 8)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert lines[0]["is"] == "policy"
    assert [line["is"] for line in lines if line.get("rid") == "one"] == EVENTS
    assert [line["is"] for line in lines if line.get("rid") == "two"] == ["came", "stays", "ends"]


@pytest.mark.parametrize(
    ("rank", "is_enabled", "expected"), [(0, True, True), (1, True, False), (0, False, False)]
)
def test_one_rank_traces(rank: int, is_enabled: bool, expected: bool) -> None:
    with get_parallel().override(attn_tp_rank=rank):
        found = trace_of(make_bare_scheduler(enable_trace=is_enabled))
    assert (found is not None) is expected
