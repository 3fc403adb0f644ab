from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.runtime_context import get_parallel
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession

from patches.carrier import session_of
from patches.scheduler.trace import trace_of
from tests.engine.serving import wait_until
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, make_bare_scheduler, make_request


def test_a_refused_turn_does_not_free_its_session_for_a_third_one(server: Server) -> None:
    session = Session(1000, "a", streaming=True)
    session._inflight = True
    sessions: Any = StreamingSession(Any)
    sessions.slots["a"] = SimpleNamespace(kv=SimpleNamespace(holds_kv=True))
    for to_finish in (None, "there is an active request"):
        turn: Any = SimpleNamespace(
            session=session, to_finish=to_finish, release_mm_inputs_on_abort=lambda: None
        )
        server.hooks["create_req"](turn, session)
        assert (sessions.find_active_slot(turn) is None) == (to_finish is not None)
        assert session._inflight
    closed: list[str] = []
    server.state.core.limits.sessions = SimpleNamespace(closed=closed.append)  # type: ignore[assignment]
    server.hooks["close_session"](None, server.scheduler, SimpleNamespace(session_id="a"))
    assert closed == [session_of("a")]


def test_broken_counters_stop_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.state, "stats", fail)
    # The HTTP process adds to `slo`.
    assert server.stats() == {"slo": {}, "error": "ZeroDivisionError('a bug')"}


def test_a_request_that_is_aborted_twice_keeps_its_job_and_ends(server: Server) -> None:
    (req,) = server.arrive(make_request([9]))
    before = req.sage
    server.arrive(req)
    assert req.sage is before
    req.origin_input_ids = req.origin_input_ids[:3]  # SGLang has cut it
    server.hooks["_add_request_to_queue"](lambda *_: None, server.scheduler, req)
    assert req.sage.job.input_tokens == 3
    server.hooks["_release_aborted_request"](server.scheduler, req)
    assert req.sage.has_ended


def test_prompts_of_both_kinds_do_not_share_a_prefill(server: Server) -> None:
    of_ids, of_embeds = server.arrive(make_request([10] * 9), make_request([10] * 9))
    of_embeds.input_embeds = [[0.0]]
    adder = SimpleNamespace(can_run_list=[of_ids])
    add = server.hooks["add_one_req"]
    assert add(pytest.fail, adder, of_embeds) is AddReqResult.OTHER


def test_one_prompt_is_chunked_at_a_time() -> None:
    found = SimpleNamespace(is_chunked=True)
    for policy, expected in (("sage", AddReqResult.OTHER), ("fcfs", found)):
        select = Server(schedule_policy=policy).hooks["_select_prefill_admission"]
        assert select(lambda *args, **kw: found, None, None, has_chunked_req=True) is expected


def test_one_rank_of_each_scheduler_traces(tmp_path: Path) -> None:
    for ranks in ({}, {"dp_rank": 0}, {"attn_tp_rank": 1}, {"attn_cp_rank": 1}):
        with get_parallel().override(**ranks):
            found = trace_of(make_bare_scheduler(_sage_trace=str(tmp_path / "trace")))
            assert (found is None) == ("attn_tp_rank" in ranks or "attn_cp_rank" in ranks)
            assert trace_of(make_bare_scheduler()) is None
    wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"trace", "trace.dp0"})
