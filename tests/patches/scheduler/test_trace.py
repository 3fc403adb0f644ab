"""The trace of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.runtime_context import get_parallel

from patches.scheduler.trace import trace_of
from sage_sched.plan import Admit, Preempt, PreemptionMode
from tests.engine.serving import wait_until
from tests.patches.schedulers import Server, StandInBatch, make_bare_scheduler, make_request


def traced(server: Server) -> None:
    """Two requests, of which the first yields to the second; the second finds no room."""
    one, two = make_request([20] * 9, 7, rid="one"), make_request([20] * 9, 7, rid="two")
    server.arrive(one, two)
    job, other, listeners = one.sage.job, two.sage.job, server.state.listeners
    actions = [Preempt(job, PreemptionMode.SWAP, "behind", other), Admit(other, "room")]
    listeners.carried_out(actions, {job: one, other: two}, [two])
    one.sage.waits.since_s, one.sage.waits.num_before = one.sage.waits.came_s - 2.0, 3
    listeners.ran(StandInBatch([one], prefills=True))
    server.state.end(one, was_aborted=False)
    server.state.end(two, was_aborted=True)


def test_a_file_reports_predictions_preemptions_and_waits(tmp_path: Path) -> None:
    scheduler = make_bare_scheduler()
    scheduler.server_args._sage_trace = str(tmp_path / "trace")
    server = Server(scheduler)
    traced(server)
    wait_until(lambda: server.stats()["trace"]["num_written"] == 8)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert lines[0]["is"] == "policy"
    one, two = (
        {line["is"]: line for line in lines if line.get("rid") == rid} for rid in ("one", "two")
    )
    assert list(one) == ["came", "preempt", "starts", "ends"]
    assert (one["came"]["p50_tokens"], one["came"]["source"]) == (20, "history")
    preempted = one["preempt"]
    assert (preempted["reason"], preempted["to"]) == ("behind", "two")
    assert preempted["way"] == PreemptionMode.SWAP.value
    assert one["starts"]["waited_s"] >= 2.0
    assert (one["ends"]["tokens"], one["ends"]["why"]) == (0, "done")
    assert list(two) == ["came", "stays", "ends"]
    assert two["stays"]["reason"] == "there was no room after all"
    assert two["ends"]["why"] == "aborted"


@pytest.mark.parametrize(
    ("rank", "is_enabled", "expected"), [(0, True, True), (1, True, False), (0, False, False)]
)
def test_one_rank_traces(tmp_path: Path, rank: int, is_enabled: bool, expected: bool) -> None:
    scheduler = make_bare_scheduler()
    scheduler.server_args._sage_trace = str(tmp_path / "trace") if is_enabled else None
    with get_parallel().override(attn_tp_rank=rank):
        found = trace_of(scheduler)
    assert (found is not None) is expected
