from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

from patches.carrier import encode_asked
from patches.http import settings_route
from patches.messages import SetSettings, SettingsNow
from patches.scheduler import switch as switching
from patches.scheduler.decode_pass import run_decode_pass
from patches.scheduler.state import SchedulerState
from patches.scheduler.switch import switch
from sage_sched.app.switch import Settings
from sage_sched.fields import ConfigError
from sage_sched.gaps import SwapOutBound
from sage_sched.job import Hints
from sage_sched.policies.sage import Sage
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, make_request


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return a server under sage, which cannot set up SGLang's shortest-prefill-first."""
    monkeypatch.setattr(switching, "get_context", lambda: context)
    context = SimpleNamespace(override=lambda **about: vars(context).update(about))

    def validated(name: str, tree: object) -> CacheAgnosticPolicy:
        if name == "shortest-prefill-first":
            raise ValueError("it needs prefix caching")
        return CacheAgnosticPolicy.LOF if name == "lof" else CacheAgnosticPolicy.FCFS

    return Server(policy=SimpleNamespace(_validate_and_adjust_policy=validated))


def change(server: Server, changes: Any) -> SettingsNow:
    message = SetSettings(changes=json.dumps(changes))
    answer = switch(server.scheduler, msgpack_decode(msgpack_encode(message)))
    assert msgpack_decode(msgpack_encode(answer)) == answer  # it crosses processes
    return answer


def arrivals_s(reqs: list[Any]) -> list[float]:
    return [req.sage.job.arrival_s for req in reqs]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_all_unfinished_requests_meet_the_new_policy(server: Server, mode: str) -> None:
    reqs = server.arrive(*(make_request([50] * 9) for _ in range(6)))
    running, grammar, chunked, bootstraps, sent, finished = reqs
    scheduler = server.scheduler
    scheduler.running_batch.reqs, scheduler.chunked_req = [running, finished], chunked
    scheduler.grammar_manager.grammar_queue = [grammar]
    scheduler.server_args.disaggregation_mode = mode
    server.state.only_decodes = mode == "decode"
    backwards = [SimpleNamespace(req=req, waiting_for_input=False) for req in (sent, bootstraps)]
    waiting = scheduler.disagg_decode_prealloc_queue
    if mode == "prefill":
        scheduler.disagg_prefill_bootstrap_queue.queue = [bootstraps]
        scheduler.disagg_prefill_inflight_queue = [sent]
    else:
        waiting.queue, waiting.retracted_queue = backwards[1:], [sent, bootstraps]
        scheduler.disagg_decode_transfer_queue.queue = backwards[:1]
    finished.finished_reason = "stop"
    running.output_ids.extend([1] * 30)
    before = finished.sage.job.memo
    scheduler.running_batch.batch_is_full = True
    change(server, {"schedule_policy": "ssjf"})
    assert (scheduler.schedule_policy, switching.get_context().schedule_policy) == ("ssjf", "ssjf")
    assert not scheduler.running_batch.batch_is_full
    assert [req.sage.job.memo for req in reqs] == [*[50.0] * 5, before]
    assert server.state.jobs.running([running])[0].generated_tokens == 30
    if mode == "decode":  # SGLang's own order is that of arrival
        assert waiting.retracted_queue == [bootstraps, sent]


def test_a_stock_policy_reserves_what_the_flag_says(server: Server) -> None:
    prealloc = server.scheduler.disagg_decode_prealloc_queue
    prealloc.num_reserved_decode_tokens = 9  # of our last plan
    change(server, {"schedule_policy": "fcfs"})
    reserved: list[int] = []
    run_decode_pass(server.scheduler, lambda: reserved.append(prealloc.num_reserved_decode_tokens))
    assert reserved == [server.scheduler.server_args.num_reserved_decode_tokens]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schedule_policy": "ssjf", "preemption": {"host_pool_gib": -1}}, "host_pool_gib is -1"),
        (
            {"schedule_policy": "makespan", "overload": {"enabled": True}},
            "overload.enabled is True, allowed: false under schedule_policy makespan",
        ),
        ({"schedule_policy": "trail"}, "none was loaded at the start (probe.file)"),
        ({"schedule_policy": "shortest-prefill-first"}, "it needs prefix caching"),
        ({"store": {"capacity": 5}}, "store cannot change while the server runs"),
        ({"policy": {"sage": {"regret": 3}}}, "cannot be set up: a bug"),
    ],
)
def test_a_refused_value_changes_nothing(
    server: Server, changes: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (req,) = server.queue(make_request([50] * 9))
    before = json.loads(change(server, None).settings)
    memo, policy = req.sage.job.memo, server.state.core.policy
    monkeypatch.setattr(Sage, "__init__", fail)
    answer = change(server, changes)
    assert why in answer.refusal
    assert json.loads(answer.settings) == before
    assert (req.sage.job.memo, server.state.core.policy) == (memo, policy)
    assert server.stats()["num_switches"] == 0


_PARTS = ("fair_shares", "adapters", "overload", "sessions")


@pytest.mark.parametrize(
    ("changes", "is_new"),
    [
        ({"preemption": {"enabled": False}}, set()),
        ({"policy": {"sage": {}}}, set()),
        ({"decode": {"max_gap_ms": 500.0}}, set()),
        ({"decode": {"max_swapped_ms": 500.0}}, {"swap_out"}),
        ({"overload": {"enabled": True, "max_ttft_ms": 500.0}}, {"overload"}),
        ({"policy": {"sage": {"ttft_ms": 500.0}}}, {"policy", "overload"}),
        ({"schedule_policy": "ssjf"}, {"policy", "overload", "sessions"}),
        ({"schedule_policy": "fcfs"}, {"policy", "swap_out", *_PARTS}),
    ],
)
def test_parts_unaffected_by_a_change_keep_their_learning(
    server: Server, changes: Any, is_new: set[str]
) -> None:
    def parts() -> dict[str, object]:
        limits = server.state.core.limits
        bounds = [one for one in limits.bounds if isinstance(one, SwapOutBound)]
        named = {name: getattr(limits, name) for name in _PARTS}
        return {"policy": server.state.core.policy, "swap_out": (*bounds, None)[0], **named}

    server.queue(make_request([50] * 9, hints=Hints(tenant="a", shares_fairly=True)))
    server.state.plan(server.scheduler.running_batch)
    before = parts()
    assert not change(server, changes).refusal
    after = parts()
    assert {name for name in before if after[name] is not before[name]} == is_new
    # The new queue and the kept limits know the requests once.
    server.state.plan(server.scheduler.running_batch)
    server.scheduler.waiting_queue.clear()
    server.state.plan(server.scheduler.running_batch)
    assert server.stats()["num_policy_errors"] == 0


@pytest.mark.parametrize(("changes", "counts"), [({"ttft_ms": 5.0}, True), ({"regret": 9}, False)])
def test_a_starvation_bound_counts_on_with_other_parameters(
    server: Server, changes: Any, counts: bool
) -> None:
    early, late = server.queue(make_request([50] * 9), make_request([50] * 9))
    server.state.plan(server.scheduler.running_batch)
    for job in (late.sage.job, server.state.core):  # it overtakes the first
        job.served_tokens += 9_000_000
    assert not change(server, {"policy": {"sage": changes}}).refusal
    server.state.plan(server.scheduler.running_batch)
    assert early.sage.job.passed_starvation_bound == counts


def test_any_error_is_survived(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_character(*args: object) -> None:
        raise ConfigError("\ud800")

    for owner, name, broken, why in (
        (SchedulerState, "switch", fail, "a bug"),
        (Settings, "changed", half_a_character, "\\ud800"),
    ):
        monkeypatch.setattr(owner, name, broken)
        assert why in change(server, {"schedule_policy": "ssjf"}).refusal


def test_deadlines_count_from_arrival(server: Server) -> None:
    def came(at_s: float) -> Any:
        carried = encode_asked("a", at_s, at_s)
        return make_request([9] * 9, hints=Hints(ttft_slo_ms=1000.0), carried=carried)

    reqs = server.queue(came(70.0), came(95.0), came(5000.0))
    server.state.jobs.ticked(100.0)
    change(server, {"schedule_policy": "proserve"})
    server.state.jobs.ticked(101.0)
    assert arrivals_s(reqs) == [70.0, 95.0, 100.0]
    assert server.state.view(server.scheduler.running_batch).now_s == 101.0


def test_requests_that_another_hosts_clock_stamped_come_with_the_next_tick(server: Server) -> None:
    reqs = server.queue(make_request([9] * 9, carried=encode_asked("a", 70.0, 70.0)))
    for now_s in (71.0, 72.0):
        server.state.jobs.ticked(now_s, "another host's")
        assert arrivals_s(reqs) == [71.0]


# Bodies without valid settings, and the reason of each refusal.
HOSTILE_BODIES = {
    b"": "no JSON object of settings",
    b"[]": "no object",
    b"\xff": "no JSON object of settings",
    b"[" * 60_000: "no JSON object of settings",
    b'{"policy":' * 5000 + b"1" + b"}" * 5000: "no JSON object of settings",
    b'{"policy":{"\\ud800":{}}}': "surrogates not allowed",
    b'{"preemption":{"host_pool_gib":1' + b"0" * 400 + b"}}": "preemption.host_pool_gib",
    b'{"preemption":{"host_pool_gib":1' + b"0" * 5000 + b"}}": "no JSON object of settings",
    b'{"policy":{"sage":{"regret":NaN}}}': "policy.sage.regret",
}


@pytest.mark.parametrize(("body", "why"), HOSTILE_BODIES.items(), ids=range(len(HOSTILE_BODIES)))
def test_a_hostile_body_is_refused_with_the_reason(server: Server, body: bytes, why: str) -> None:
    try:
        refusal = change(server, settings_route.changes_of(body)).refusal
    except ValueError as error:  # it is not even sent
        refusal = str(error)
    assert why in refusal
    assert len(refusal.encode()) < 2000  # it can be an answer
    # The scheduler takes anything.
    message = SetSettings(changes=body.decode(errors="replace"))
    answer = switch(server.scheduler, message)
    assert answer.refusal
    msgpack_encode(answer)


def test_a_body_too_long_is_read_no_further() -> None:
    pieces = iter([b" " * 65_536, b" ", b" "])

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    asked: Any = SimpleNamespace(stream=stream)
    with pytest.raises(ValueError, match="more than 65536 bytes"):
        asyncio.run(settings_route.body_of(asked))
    assert [*pieces] == [b" "]
