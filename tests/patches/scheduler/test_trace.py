from __future__ import annotations

from pathlib import Path

from sglang.srt.runtime_context import get_parallel

from patches.scheduler.trace import trace_of
from tests.engine.serving import wait_until
from tests.patches.schedulers import make_bare_scheduler


def test_one_rank_of_each_scheduler_traces(tmp_path: Path) -> None:
    for ranks in ({}, {"dp_rank": 0}, {"attn_tp_rank": 1}, {"attn_cp_rank": 1}):
        with get_parallel().override(**ranks):
            found = trace_of(make_bare_scheduler(_sage_trace=str(tmp_path / "trace")))
            assert (found is None) == ("attn_tp_rank" in ranks or "attn_cp_rank" in ranks)
            assert trace_of(make_bare_scheduler()) is None
    wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"trace", "trace.dp0"})
