from __future__ import annotations

import math
import time
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from patches.carrier import decode_asked, encode_asked
from patches.messages import ENDED, REFUSED
from patches.scheduler.view import ServerKv
from sage_sched.job import NO_HINTS, Hints
from sage_sched.overload import Refusal
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, make_request

ON = {"overload": {"enabled": True, "max_ttft_ms": 1000.0}}
KNOWN = {**ON, "step_time": {"decode_base_ms": 1000.0}}


def server_of(sections: Any = KNOWN, mode: str = "null") -> tuple[Server, list[Any]]:
    """Return a server with many waiting requests, and the aborts that it sends."""
    server = Server(schedule_policy="fcfs-fill", sections=sections, disaggregation_mode=mode)
    aborts: list[Any] = []
    server.scheduler.send_abort_output = lambda abort, req: aborts.append(abort)
    server.queue(*(make_request([900], rid=f"{number}") for number in range(600)))
    return server, aborts


def refuses(server: Server, req: Any) -> bool:
    """Let a request begin to wait, and return whether it was refused."""
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
    num_refused = {"ttft": int(is_refused), "ttlt": 0, "queued_tokens": 0}
    assert server.state.stats().get("overload", {}).get("num_refused") == (
        num_refused if sections else None
    )


@pytest.mark.parametrize("broken", ["lasting", "refuses"])
def test_a_prediction_that_fails_refuses_none(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, aborts = server_of()
    if broken == "refuses":  # a time that is not a number
        endless = Refusal("ttft", math.inf, 1.0, 1.0)
        monkeypatch.setattr(server.state.core.limits.overload, broken, lambda *args, **kw: endless)
    else:
        monkeypatch.setattr(server.state.core.policy, broken, fail)
    assert not refuses(server, *server.arrive(make_request([900])))
    assert (aborts, server.state.stats()["num_policy_errors"]) == ([], 1)


def test_a_call_is_not_refused_for_its_own_prompts() -> None:
    # Otherwise an idle server would refuse a long list of prompts again and again.
    server, _ = server_of()
    server.scheduler.waiting_queue.clear()
    for came_s in (1.0, 1.0, 2.0):
        (req,) = server.arrive(make_request([900], carried=encode_asked("a call", came_s, 1.0)))
        assert refuses(server, req) == (came_s == 2.0)
        server.scheduler.waiting_queue.append(req)
    # An admitted request stays, regardless of the requests that wait by now.
    assert not refuses(server, server.scheduler.waiting_queue[0])


@pytest.mark.parametrize(
    ("about", "num_admitted"),
    [
        ({}, 4),
        ({"runs": True}, 6),
        ({"chunked": True}, 3),
        ({"schedule_policy": "fcfs"}, 6),  # SGLang alone decides
        ({"cap": 79}, 3),
        ({"cap": 0}, 6),
        ({"cap": 1}, 1),  # with an idle server, longer prompts are served too
        ({"cached": 19}, 6),
        ({"call": 1.0}, 6),
        ({"waited": True}, 6),
        ({"mode": "decode"}, 6),
    ],
)
def test_prompt_tokens_wait_up_to_a_cap(
    about: dict[str, Any], num_admitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without step times, predictions and `enabled`. Six prompts of 20 tokens come."""
    monkeypatch.setattr(ServerKv, "cached", lambda kv, job: (about.get("cached", 0), 0))
    cap = {"overload": {"max_queued_tokens": about.get("cap", 80)}}
    policy, mode = about.get("schedule_policy", "sage"), about.get("mode", "null")
    server = Server(sections=cap, schedule_policy=policy, disaggregation_mode=mode)
    aborts: list[Any] = []
    server.scheduler.send_abort_output = lambda abort, req: aborts.append(abort.finished_reason)
    if "chunked" in about:
        [server.scheduler.chunked_req] = server.arrive(make_request())
    for number in range(6):
        if "runs" in about and number > 1:
            del server.scheduler.waiting_queue[0]
            server.state.core.now_s += 1.0
        came_s = about.get("call", float(number))
        (req,) = server.arrive(make_request(carried=encode_asked("a call", came_s, 1.0)))
        req.time_stats.wait_queue_entry_time = float(about.get("waited", False))
        if not refuses(server, req):
            server.scheduler.waiting_queue.append(req)
    assert [found["status_code"] for found in aborts] == [ENDED] * (6 - num_admitted)
    if found := server.state.stats().get("overload"):
        assert found["num_refused"]["queued_tokens"] == 6 - num_admitted


@pytest.mark.parametrize(("came_s", "is_refused"), [(2.0, True), (1.0, False)])
def test_without_a_queue_others_batches_may_be_too_slow(came_s: float, is_refused: bool) -> None:
    slow = {"overload": {"enabled": True, "max_ttft_ms": 1000.0, "max_tpot_ms": 100.0}}
    slow["step_time"] = {"decode_base_ms": 40.0, "decode_request_ms": 10.0}
    server, _ = server_of(slow)
    server.scheduler.waiting_queue.clear()

    def arrive(number: int, came_s: float) -> list[Any]:
        asked = encode_asked("a call", came_s, 1.0)
        return server.arrive(*(make_request([900], carried=asked) for _ in range(number)))

    running = arrive(20, 1.0)
    assert not any(refuses(server, req) for req in running)
    server.scheduler.running_batch.reqs = running
    (req,) = arrive(1, came_s)
    assert refuses(server, req) == is_refused


def test_a_request_is_looked_up_and_running_ages_are_read_before_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(schedule_policy="fcfs-fill", sections=KNOWN)
    server.scheduler.running_batch.reqs = server.arrive(make_request([900], rid="runs"))
    (running,) = server.scheduler.running_batch.reqs
    running.output_ids.extend([1] * 300)
    seen = list[tuple[int, int, int]]()
    overload = server.state.core.limits.overload
    original = overload.newcomer

    def newcomer(job: Any, *args: Any) -> Any:
        seen.append((job.cached_tokens, job.shared_tokens, running.sage.job.generated_tokens))
        return original(job, *args)

    monkeypatch.setattr(overload, "newcomer", newcomer)
    monkeypatch.setattr(ServerKv, "cached", lambda kv, job: (15, 0))
    monkeypatch.setattr(ServerKv, "shared_tokens", lambda kv, job: 12)
    (req,) = server.arrive(make_request([900]))
    assert not refuses(server, req)
    assert seen == [(15, 12, 300)]
    # A streaming session's prompt would lend its KV to any look-up.
    (turn,) = server.arrive(make_request([900]))
    turn.sage.job.keeps_memory = True
    assert not refuses(server, turn)
    assert seen[1:] == [(0, 0, 300)]


def test_a_long_list_of_prompts_looks_at_each_waiting_request_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, looked_at = Server(schedule_policy="fcfs-fill", sections=KNOWN), list[Any]()

    def asked(custom_params: Any) -> Any:
        looked_at.append(custom_params)
        return decode_asked(custom_params)

    monkeypatch.setattr("patches.scheduler.overload.decode_asked", asked)
    for _ in range(50):
        (req,) = server.arrive(make_request([900], carried=encode_asked("a call", 1.0, 1.0)))
        assert not refuses(server, req)
        server.scheduler.waiting_queue.append(req)
    assert len(looked_at) == 50 + 49


def test_a_request_ends_once_it_has_waited_for_as_long_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, now_s = Server(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    brief, patient = Hints(max_wait_ms=500.0), Hints(max_wait_ms=2000.0)
    made = (("a", brief), ("b", brief), ("be", patient), ("c", brief), ("none", NO_HINTS))
    reqs = server.arrive(*(make_request([9], hints=hints, rid=rid) for rid, hints in made))
    starts = reqs[3]
    starts.sage.waits.ends()
    server.scheduler.waiting_queue = [req for req in reqs if req is not starts]

    def ended() -> list[str]:
        found = [m for m in server.state.listeners.polled() if isinstance(m, AbortReq)]
        assert all(abort.finished_reason["status_code"] == 503 for abort in found)
        return [abort.rid for abort in found]

    assert ended() == []
    now_s[0] = 0.6
    assert ended() == ended() == ["a"]  # until it has arrived
    reqs[0].sage.has_ended = True
    assert ended() == []  # an abort of b would end be, too
    now_s[0] = 2.5
    assert ended() == ["be"]
