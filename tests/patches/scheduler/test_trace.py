from __future__ import annotations

import json
from pathlib import Path

from sglang.srt.runtime_context import get_parallel

from patches.scheduler.trace import trace_of
from sage_sched.plan import Admit, Preempt, PreemptionMode
from tests.engine.serving import wait_until
from tests.patches.schedulers import Server, StandInBatch, make_bare_scheduler, make_request


def test_a_file_reports_predictions_preemptions_and_waits(tmp_path: Path) -> None:
    """Of two requests the first yields to the second, which finds no room."""
    server = Server(_sage_trace=str(tmp_path / "trace"))
    one, two = make_request([20] * 9, 7, rid="one"), make_request([20] * 9, 7, rid="two")
    server.arrive(one, two)
    job, other, listeners = one.sage.job, two.sage.job, server.state.listeners
    actions = [Preempt(job, PreemptionMode.SWAP, "behind", other), Admit(other, "room")]
    listeners.carried_out(actions, {job: one, other: two}, [two])
    one.sage.waits.since_s, one.sage.waits.num_before = one.sage.waits.came_s - 2.0, 3
    for _ in range(2):  # it waits once
        listeners.ran(StandInBatch([one], prefills=True))
    server.state.end(one, was_aborted=False)
    server.state.end(two, was_aborted=True)
    wait_until(lambda: server.stats()["trace"]["num_written"] == 8)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert lines[5]["waited_s"] >= 2.0
    rows = [[line.get(name) for name in ("is", "rid", "source", "p50_tokens", "reason", "way", "to",
                                         "place", "tokens", "why")] for line in lines]  # fmt: skip
    came = ["history", 20, None, None, None, None, None, None]
    assert rows == [
        ["policy", None, *[None] * 8],
        ["came", "one", *came],
        ["came", "two", *came],
        ["preempt", "one", None, None, "behind", PreemptionMode.SWAP.value, "two", *[None] * 3],
        ["stays", "two", None, None, "there was no room after all", *[None] * 5],
        ["starts", "one", *[None] * 5, 3, 0, None],
        ["ends", "one", *[None] * 6, 0, "done"],
        ["ends", "two", *[None] * 6, 0, "aborted"],
    ]


def test_one_rank_of_each_scheduler_traces(tmp_path: Path) -> None:
    for ranks in ({}, {"dp_rank": 0}, {"attn_tp_rank": 1}, {"attn_cp_rank": 1}):
        with get_parallel().override(**ranks):
            found = trace_of(make_bare_scheduler(_sage_trace=str(tmp_path / "trace")))
            assert (found is None) == ("attn_tp_rank" in ranks or "attn_cp_rank" in ranks)
            assert trace_of(make_bare_scheduler()) is None
    wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"trace", "trace.dp0"})
