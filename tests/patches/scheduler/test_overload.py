"""Requests that a scheduler refuses as they begin to wait."""

from __future__ import annotations

import math
import time
from itertools import cycle
from typing import Any

import pytest

from patches.carrier import encode_asked
from patches.messages import REFUSED
from sage_sched.overload import Refusal
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, StandInBatch, make_request

ON = {"overload": {"enabled": True, "max_ttft_ms": 1000.0}}
KNOWN = {**ON, "step_time": {"decode_base_ms": 1000.0}}


def server_of(sections: Any = KNOWN) -> tuple[Server, list[Any]]:
    """A server with many requests that have come and wait, and the aborts that it sends."""
    server = Server(schedule_policy="fcfs-fill", sections=sections)
    aborts: list[Any] = []
    server.scheduler.send_abort_output = lambda abort, req: aborts.append(abort)
    server.queue(*(make_request([900], rid=f"{number}") for number in range(600)))
    return server, aborts


def refuses(server: Server, req: Any) -> bool:
    limited = server.hooks["_abort_on_queued_limit"]
    server.scheduler.max_queued_requests = None
    found: bool = limited(lambda scheduler, req: False, server.scheduler, req)
    return found


def test_a_refused_request_is_aborted_and_one_that_waits_again_is_not() -> None:
    server, aborts = server_of()
    (late,) = server.arrive(make_request([900], rid="late"))
    assert refuses(server, late)
    (abort,) = aborts
    assert abort.rid == "late"
    assert abort.finished_reason["status_code"] == REFUSED
    assert server.state.stats()["overload"]["num_refused"] == {"ttft": 1, "ttlt": 0}
    (begun,) = server.arrive(make_request([900], answer_tokens=3))
    assert not refuses(server, begun)


def test_the_wall_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def decisions() -> list[bool]:
        server, _ = server_of()
        return [refuses(server, *server.arrive(make_request([900]))) for _ in range(120)]

    steady = decisions()
    assert 0 < sum(steady) < 120
    jumps_s = cycle([0.0, 1e12])
    monkeypatch.setattr(time, "time", lambda: next(jumps_s))
    assert decisions() == steady


def test_a_call_is_not_refused_for_its_own_prompts() -> None:
    """Else an idle server would refuse a long list of prompts again and again."""
    server, _ = server_of()
    server.scheduler.waiting_queue.clear()
    for came_s in (1.0, 1.0, 2.0):
        (req,) = server.arrive(make_request([900], carried=encode_asked("a call", came_s, 1.0)))
        assert refuses(server, req) == (came_s == 2.0)
        server.scheduler.waiting_queue.append(req)


def test_a_time_that_no_number_tells_refuses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    server, aborts = server_of()
    endless = Refusal("ttft", math.inf, 1.0)
    monkeypatch.setattr(server.state.limits.overload, "refuses", lambda *args, **kw: endless)
    (late,) = server.arrive(make_request([900]))
    assert not refuses(server, late)
    assert not aborts
    assert server.state.stats()["num_policy_errors"] == 1


def test_a_ttft_is_compared_once() -> None:
    """Under overlap an answer of one token is in one more batch."""
    server = Server(schedule_policy="fcfs-fill", sections=KNOWN)
    (req,) = server.arrive(make_request([900]))
    assert not refuses(server, req)
    req.output_ids.append(1)
    before = dict(server.state.overload.ratios())
    req.sage.has_ended = True
    server.state.overload.stepped(StandInBatch([req]), None)
    assert server.state.overload.ratios() == before == {}


def test_where_it_is_off_a_step_costs_nothing() -> None:
    class Unread:
        @property
        def reqs(self) -> Any:
            raise AssertionError

    Server(schedule_policy="fcfs-fill").state.overload.stepped(Unread(), None)


@pytest.mark.parametrize("sections", [{}, ON])
def test_by_default_and_before_step_times_are_learned_none_is(sections: Any) -> None:
    server, aborts = server_of(sections)
    (late,) = server.arrive(make_request([900]))
    assert not refuses(server, late)
    assert not aborts


def test_a_prediction_that_fails_refuses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    server, aborts = server_of()
    monkeypatch.setattr(server.state.policy, "lasting_key", fail)
    (late,) = server.arrive(make_request([900]))
    assert not refuses(server, late)
    assert server.state.stats()["num_policy_errors"] == 1
    assert not aborts
