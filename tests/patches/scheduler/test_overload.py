"""Requests that a scheduler refuses as they begin to wait."""

from __future__ import annotations

import math
import time
from itertools import cycle
from typing import Any

import pytest

from patches.carrier import DRY_RUN, encode_asked
from patches.messages import REFUSED, refusal_in
from sage_sched.overload import Refusal
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, StandInBatch, make_request

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


def degrading(action: str) -> tuple[Server, Any]:
    """A server that degrades, and a late request that has begun to wait there."""
    overload = {**ON["overload"], "max_tpot_ms": 1.0, "action": action, "cap_tokens": 5}
    server, aborts = server_of({**KNOWN, "overload": overload})
    (late,) = server.arrive(make_request([900], rid="late"))
    assert not refuses(server, late)
    assert not aborts
    assert late.customized_info == {"sage_overload": [action]}
    found = server.state.stats()["overload"]
    assert found["num_degraded"] == {"cap": 0, "behind": 0, action: 1}
    assert found["num_refused"] == {"ttft": 0, "ttlt": 0}
    return server, late


def test_a_late_request_is_placed_behind_all_others() -> None:
    server, late = degrading("behind")
    (later,) = server.arrive(make_request([900], rid="later"))
    assert server.ordered([late, later]) == [later, late]
    late.output_ids.append(1)
    server.state.overload.ended(late, was_aborted=False)
    assert server.state.overload.ratios() == {}  # its times were those of its own place


def test_requests_that_only_wait_behind_make_none_late() -> None:
    server, late = degrading("behind")
    server.scheduler.waiting_queue = [late]
    (other,) = server.arrive(make_request([900], carried=encode_asked("other", 9.0, 9.0)))
    assert not refuses(server, other)
    assert other.customized_info is None


def test_a_late_answer_is_capped() -> None:
    """The cap makes it short enough for the order of `sage`."""
    overload = {"enabled": True, "max_ttft_ms": 1e6, "max_tpot_ms": 1.0, "action": "cap"}
    sections = {**KNOWN, "overload": {**overload, "cap_tokens": 5}}
    server = Server(schedule_policy="sage", sections=sections)
    server.queue(*(make_request([900], rid=f"{number}") for number in range(600)))
    (late, short) = server.arrive(
        make_request([900], rid="late"), make_request([900], rid="short", max_new_tokens=5)
    )
    assert not refuses(server, late)
    assert late.sampling_params.max_new_tokens == late.sage.job.max_new_tokens == 5
    assert late.customized_info == {"sage_overload": ["cap"]}
    assert server.ordered([short, late]) == [late, short]  # by arrival, as both are as short
    assert not refuses(server, short)
    assert short.customized_info is None


def test_an_answer_that_would_be_late_even_capped_is_refused() -> None:
    overload = {**ON["overload"], "action": "cap", "cap_tokens": 5}
    server, aborts = server_of({**KNOWN, "overload": overload})
    (late,) = server.arrive(make_request([900], rid="late"))
    assert refuses(server, late)
    assert len(aborts) == 1


@pytest.mark.parametrize(
    ("mode", "times"),
    [("null", ["ttft_ms", "ttlt_ms"]), ("prefill", ["ttft_ms"]), ("decode", ["ttlt_ms"])],
)
def test_a_dry_run_gets_its_times_and_changes_nothing(mode: str, times: list[str]) -> None:
    server, aborts = server_of(KNOWN, mode)
    (late,) = server.arrive(make_request([900], rid="late", carried=DRY_RUN))
    assert refuses(server, late)
    told = refusal_in(aborts[0])
    assert told is not None
    assert told["late"] == (mode == "null")
    assert {"ttft_ms", "ttlt_ms"} & {*told} == {*times}
    assert all(told[name] > 0 for name in times)
    assert sum(server.state.stats()["overload"]["num_refused"].values()) == 0


@pytest.mark.parametrize(("sections", "lengths"), [({}, [900]), (KNOWN, [])])
def test_a_dry_run_without_a_prediction_is_an_error(sections: Any, lengths: list[int]) -> None:
    server, aborts = server_of(sections)
    (late,) = server.arrive(make_request(lengths, rid="late", carried=DRY_RUN))
    assert refuses(server, late)
    assert refusal_in(aborts[0]) is None
    assert aborts[0].finished_reason["status_code"] == 503


@pytest.mark.parametrize(
    ("mode", "fields"),
    [("null", {"ttft_ms", "ttlt_ms", "late"}), ("prefill", {"ttft_ms"}), ("decode", {"ttlt_ms"})],
)
def test_a_load_has_the_times_of_a_typical_request(mode: str, fields: set[str]) -> None:
    server, _ = server_of(KNOWN, mode)
    server.state.ticked(1.0, "")
    assert server.state.overload.outlook is None  # none has come
    (first,) = server.arrive(make_request([900]))
    refuses(server, first)
    server.state.ticked(1.1, "")
    assert server.state.overload.outlook is None  # it is renewed four times a second
    server.state.ticked(1.3, "")
    found = server.state.overload.outlook
    assert set(found) == fields
    assert all(value > 0 for value in found.values())
    for req in server.scheduler.waiting_queue:
        server.state.end(req, was_aborted=True)
    server.scheduler.waiting_queue.clear()
    server.state.ticked(2.0, "")
    assert all(server.state.overload.outlook[name] < found[name] for name in fields)


def test_an_outlook_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = server_of()
    monkeypatch.setattr(server.state.limits.overload, "typical", fail)
    server.state.ticked(1.0, "")
    assert server.state.overload.outlook is None
    assert server.state.stats()["num_policy_errors"] == 1


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
