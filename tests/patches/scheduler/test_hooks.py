from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession
from sglang.utils import TypeBasedDispatcher

from patches.messages import Scores, StepTimes, Tick
from patches.scheduler.kv_copy import is_swapped
from patches.scheduler.preemption import Preemption
from sage_sched.app.config import PreemptionConfig
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, make_request


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


def test_a_flush_that_was_refused_drops_no_copies(server: Server) -> None:
    (req,) = server.queue(make_request([9]))
    req.kv.retraction_backup = object()
    preemption = server.state.preemption = Preemption(server.scheduler, PreemptionConfig())
    for success, num_forgotten in ((False, 0), (True, 1)):
        server.hooks["flush_cache"](success, server.scheduler)
        assert is_swapped(req) is not success
        assert preemption.stats()["num_recomputed"] == num_forgotten


def test_the_clock_is_broadcast_if_plans_need_it() -> None:
    for policy, kinds in (("fcfs", [AbortReq]), ("sage", [AbortReq, Tick])):
        server = Server(schedule_policy=policy)
        messages = server.hooks["_poll_timeout_aborts"](lambda _: [AbortReq()], server.scheduler)
        assert [type(message) for message in messages] == kinds


def test_messages_of_ours_are_taken(server: Server) -> None:
    server.scheduler._request_dispatcher = TypeBasedDispatcher([])
    server.hooks["init_request_dispatcher"](None, server.scheduler)
    taken: list[Any] = []
    server.state.probing = SimpleNamespace(scored=taken.append)
    take = server.scheduler._request_dispatcher
    scores = Scores(number=0, arrivals=[], ages=[], steps=b"")
    learned = StepTimes(seconds=[1.0] * 7, source="learned")
    for message in (Tick(now_s=5.0, clock="any"), scores, learned):
        take(message)
    assert (server.state.jobs.now_s, taken) == (5.0, [scores])
    assert server.stats()["step_time"]["source"] == "learned"
