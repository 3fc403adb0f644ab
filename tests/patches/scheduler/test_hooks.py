"""Hooks of a scheduler process, one by one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession

from patches.scheduler.hooks import scheduler_hooks
from sage_sched.app.config import SageConfig
from tests.patches.scheduler.test_state import fail


def test_nobody_looks_at_the_queue_without_a_limit_on_it() -> None:
    hooks = {hook.target.rpartition(".")[2]: hook for hook in scheduler_hooks(SageConfig())}
    unlimited: Any = SimpleNamespace(max_queued_requests=None)  # and without a queue
    limited = hooks["_abort_on_queued_limit"].hook
    assert limited(lambda scheduler, req: (scheduler, req), unlimited, 7) == (unlimited, 7)


def test_a_turn_that_is_refused_does_not_free_its_session_for_a_third_one() -> None:
    hooks = {hook.target.rpartition(".")[2]: hook for hook in scheduler_hooks(SageConfig())}
    session = Session(1000, "a", streaming=True)
    session._inflight = True
    sessions: Any = StreamingSession(Any)
    sessions.slots["a"] = SimpleNamespace(kv=SimpleNamespace(holds_kv=True))
    for to_finish in (None, "there is an active request"):
        turn: Any = SimpleNamespace(
            session=session, to_finish=to_finish, release_mm_inputs_on_abort=lambda: None
        )
        hooks["create_req"].hook(turn, session)
        assert (sessions.find_active_slot(turn) is None) == (to_finish is not None)
        assert session._inflight


def test_a_scheduler_goes_on_though_what_it_counts_cannot_be_told() -> None:
    hooks = {hook.target.rpartition(".")[2]: hook for hook in scheduler_hooks(SageConfig())}
    result = SimpleNamespace(internal_state={})
    scheduler: Any = SimpleNamespace(sage=SimpleNamespace(stats=partial(fail, None)))
    hooks["get_internal_state"].hook(result, scheduler, object())
    assert "a bug" in result.internal_state["sage"]["error"]
    # What the HTTP process adds to it has a place.
    assert result.internal_state["sage"]["slo"] == {}
