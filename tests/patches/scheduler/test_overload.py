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
        endless = Refusal("ttft", math.inf, 1.0)
        monkeypatch.setattr(server.state.limits.overload, broken, lambda *args, **kw: endless)
    else:
        monkeypatch.setattr(server.state.policy, broken, fail)
    assert not refuses(server, *server.arrive(make_request([900])))
    assert (aborts, server.state.stats()["num_policy_errors"]) == ([], 1)


def test_a_ranks_own_clock_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def decisions() -> list[bool]:
        server, _ = server_of()
        return [refuses(server, *server.arrive(make_request([900]))) for _ in range(120)]

    steady = decisions()
    assert 0 < sum(steady) < 120
    jumps_s = cycle([0.0, 1e12])
    monkeypatch.setattr(time, "monotonic", lambda: next(jumps_s))
    assert decisions() == steady


def test_a_call_is_not_refused_for_its_own_prompts() -> None:
    # Else an idle server would refuse a long list of prompts again and again.
    server, _ = server_of()
    server.scheduler.waiting_queue.clear()
    for came_s in (1.0, 1.0, 2.0):
        (req,) = server.arrive(make_request([900], carried=encode_asked("a call", came_s, 1.0)))
        assert refuses(server, req) == (came_s == 2.0)
        server.scheduler.waiting_queue.append(req)
    # A request that was let in stays in, whoever waits by now.
    assert not refuses(server, server.scheduler.waiting_queue[0])


def test_late_requests_are_placed_behind_all_others_and_make_none_late() -> None:
    overload = {**ON["overload"], "max_tpot_ms": 1.0, "action": "behind"}
    server, aborts = server_of({**KNOWN, "overload": overload})
    late, later = server.arrive(make_request([900], rid="late"), make_request([900], rid="later"))
    assert not refuses(server, late)
    assert (aborts, late.customized_info) == ([], {"sage_overload": ["behind"]})
    assert server.state.stats()["overload"] == {
        "num_refused": {"ttft": 0, "ttlt": 0}, "num_degraded": {"cap": 0, "behind": 1},
        "real_to_predicted": {},
    }  # fmt: skip
    assert server.ordered([late, later]) == [later, late]
    server.step(late)
    server.state.overload.ended(late, was_aborted=False)
    assert server.state.overload.ratios() == {}  # its times were those of its own place
    server.scheduler.waiting_queue = [late]
    (other,) = server.arrive(make_request([900], carried=encode_asked("other", 9.0, 9.0)))
    assert not refuses(server, other)
    assert other.customized_info is None
    server.state.ticked(1.0, "")
    assert server.state.overload.outlook["late"] == 0


def test_a_late_answer_is_capped_and_refused_if_that_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cap makes it short enough for the order of `sage`."""
    overload = {"max_ttft_ms": 1e6, "max_tpot_ms": 1.0, "action": "cap", "cap_tokens": 5}
    sections = {**KNOWN, "overload": {**ON["overload"], **overload}}
    server = Server(schedule_policy="sage", sections=sections)
    server.queue(*(make_request([900], rid=f"{number}") for number in range(600)))
    late, short = server.arrive(make_request([900]), make_request([900], max_new_tokens=5))
    assert not refuses(server, late)
    assert late.sampling_params.max_new_tokens == late.sage.job.max_new_tokens == 5
    assert late.customized_info == {"sage_overload": ["cap"]}
    assert server.ordered([short, late]) == [late, short]  # by arrival, as both are as short
    assert not refuses(server, short)
    assert short.customized_info is None
    # A prediction that fails after the cap leaves the request as it came.
    monkeypatch.setattr(server.state.limits.overload, "refuses", fail)
    later, shorter = server.arrive(make_request([900]), make_request([600]))
    assert not refuses(server, later)
    assert later.sampling_params.max_new_tokens == later.sage.job.max_new_tokens > 5
    assert later.customized_info is None
    assert server.ordered([later, shorter]) == [shorter, later]
    server, aborts = server_of({**KNOWN, "overload": {**ON["overload"], "action": "cap"}})
    assert refuses(server, *server.arrive(make_request([900])))
    assert len(aborts) == 1


MODES = pytest.mark.parametrize(
    ("mode", "times"),
    [("null", {"ttft_ms", "ttlt_ms"}), ("prefill", {"ttft_ms"}), ("decode", {"ttlt_ms"})],
)


@MODES
def test_a_dry_run_gets_its_times_and_changes_nothing(mode: str, times: set[str]) -> None:
    server, aborts = server_of(KNOWN, mode)
    num_ranked = server.stats()["num_ranked"]
    assert refuses(server, *server.arrive(make_request([900], carried=DRY_RUN)))
    assert server.stats()["num_ranked"] == num_ranked
    told = refusal_in(aborts[0])
    assert told is not None
    assert (told["late"], {"ttft_ms", "ttlt_ms"} & {*told}) == (mode == "null", times)
    assert all(told[name] > 0 for name in times)
    assert sum(server.state.stats()["overload"]["num_refused"].values()) == 0


@pytest.mark.parametrize(("sections", "lengths"), [({}, [900]), (KNOWN, [])])
def test_a_dry_run_without_a_prediction_is_an_error(sections: Any, lengths: list[int]) -> None:
    server, aborts = server_of(sections)
    assert refuses(server, *server.arrive(make_request(lengths, carried=DRY_RUN)))
    assert (refusal_in(aborts[0]), aborts[0].finished_reason["status_code"]) == (None, 503)


@MODES
def test_a_load_has_the_times_of_a_typical_request(
    mode: str, times: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = server_of(KNOWN, mode)
    overload, queue = server.state.overload, server.scheduler.waiting_queue
    server.state.ticked(1.0, "")
    assert overload.outlook is None  # none has come
    refuses(server, *server.arrive(make_request([900])))
    server.state.ticked(1.1, "")
    assert overload.outlook is None  # it is renewed four times a second
    server.state.ticked(1.3, "")
    found = overload.outlook
    assert {*found} == times | ({"late"} if mode == "null" else set())
    assert all(value > 0 for value in found.values())
    for req in queue:
        server.state.end(req, was_aborted=True)
    queue.clear()
    server.state.ticked(2.0, "")
    assert all(overload.outlook[name] < found[name] for name in found)
    monkeypatch.setattr(server.state.limits.overload, "typical", fail)
    server.state.ticked(3.0, "")
    assert (overload.outlook, server.state.stats()["num_policy_errors"]) == (None, 1)
    overload.outlook = found
    state = server.state
    state.switch(state.settings, state.policy, [])  # from now on there may be no ticks
    assert overload.outlook is None


def test_real_times_are_compared_with_predicted_ones_once() -> None:
    server = Server(schedule_policy="fcfs-fill", sections=KNOWN)
    reqs = server.arrive(make_request([900]), make_request([900]))
    assert [refuses(server, req) for req in reqs] == [False, False]
    aborted, req = reqs
    server.state.end(aborted, was_aborted=True)
    assert server.state.overload.ratios() == {}
    server.step(req)
    assert server.state.overload.ratios().keys() == {"ttft"}
    server.state.end(req, was_aborted=False)
    before = server.state.overload.ratios()
    assert before.keys() == {"ttft", "ttlt"}
    server.step(req, tokens=0)  # under overlap it is in one more batch
    assert server.state.overload.ratios() == before
