from __future__ import annotations

import math
from typing import Any

import pytest

from patches.carrier import encode_asked
from patches.messages import REFUSED
from sage_sched.overload import Refusal
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, make_request

ON = {"overload": {"enabled": True, "max_ttft_ms": 1000.0}}
KNOWN = {**ON, "step_time": {"decode_base_ms": 1000.0}}


def server_of(sections: Any = KNOWN, mode: str = "null") -> tuple[Server, list[Any]]:
    """A server with many requests that have come and wait, and the aborts that it sends."""
    server = Server(schedule_policy="fcfs-fill", sections=sections, disaggregation_mode=mode)
    aborts: list[Any] = []
    server.scheduler.send_abort_output = lambda abort, req: aborts.append(abort)
    server.queue(*(make_request([900], rid=f"{number}") for number in range(600)))
    return server, aborts


def refuses(server: Server, req: Any) -> bool:
    """A request begins to wait; return whether it was turned away."""
    queued: list[Any] = []
    released: list[Any] = []
    server.scheduler._release_aborted_request = released.append
    adds = server.hooks["_add_request_to_queue"]
    adds(lambda scheduler, req: queued.append(req), server.scheduler, req)
    assert [*queued, *released] == [req]
    return bool(released)


@pytest.mark.parametrize(
    ("sections", "state", "is_refused"),
    [
        (KNOWN, {}, True),
        ({}, {}, False),
        (ON, {}, False),  # before step times are learned
        (KNOWN, {"output_ids": [1]}, False),  # it waits again
        (KNOWN, {"to_finish": "aborted"}, False),
    ],
)
def test_a_late_request_is_refused_once(sections: Any, state: Any, is_refused: bool) -> None:
    server, aborts = server_of(sections)
    (late,) = server.arrive(make_request([900], rid="late"))
    vars(late).update(state)
    assert refuses(server, late) == is_refused
    found = [(abort.rid, abort.finished_reason["status_code"]) for abort in aborts]
    assert found == [("late", REFUSED)] * is_refused
    num_refused = {"ttft": int(is_refused), "ttlt": 0}
    assert server.state.stats().get("overload", {}).get("num_refused") == (
        num_refused if sections else None
    )


@pytest.mark.parametrize("broken", ["lasting_key", "refuses"])
def test_a_prediction_that_fails_refuses_none(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, aborts = server_of()
    if broken == "refuses":  # a time that no number tells
        endless = Refusal("ttft", math.inf, 1.0, 1.0)
        monkeypatch.setattr(server.state.limits.overload, broken, lambda *args, **kw: endless)
    else:
        monkeypatch.setattr(server.state.policy, broken, fail)
    assert not refuses(server, *server.arrive(make_request([900])))
    assert (aborts, server.state.stats()["num_policy_errors"]) == ([], 1)


def test_a_call_is_not_refused_for_its_own_prompts() -> None:
    # Else an idle server would refuse a long list of prompts again and again.
    server, _ = server_of()
    server.scheduler.waiting_queue.clear()
    for came_s in (1.0, 1.0, 2.0):
        (req,) = server.arrive(make_request([900], carried=encode_asked("a call", came_s, 1.0)))
        assert refuses(server, req) == (came_s == 2.0)
        server.scheduler.waiting_queue.append(req)
    # An admitted request stays, whichever requests wait by now.
    assert not refuses(server, server.scheduler.waiting_queue[0])
