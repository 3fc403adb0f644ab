"""Other settings while a scheduler runs, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

from patches.carrier import CLOCK, encode_asked, encode_hints
from patches.http import settings_route
from patches.messages import SetSettings, SettingsNow
from patches.scheduler import switch as switching
from patches.scheduler.state import SchedulerState
from patches.scheduler.switch import switch
from sage_sched.app.config import SageConfig
from sage_sched.app.switch import Settings
from sage_sched.fields import ConfigError
from sage_sched.job import Hints
from sage_sched.policies.sage import Sage
from tests.checks.full_server import stand_in_scheduler
from tests.patches.scheduler.test_state import fail, ordered, request


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return made(monkeypatch)


def made(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Any:
    """Under sage, with nobody to yield: the stand-in cannot swap."""
    one = stand_in_scheduler(lambda: 10_000)
    monkeypatch.setattr(
        switching, "get_context", lambda: SimpleNamespace(override=lambda **about: None)
    )

    def validated(name: str, tree: object) -> CacheAgnosticPolicy:
        if name == "shortest-prefill-first":
            raise ValueError("it needs prefix caching")
        return CacheAgnosticPolicy.LOF if name == "lof" else CacheAgnosticPolicy.FCFS

    one.policy = SimpleNamespace(policy=None, _validate_and_adjust_policy=validated)
    one.grammar_manager = SimpleNamespace(grammar_queue=[])
    one._collect_inflight_batches = lambda: [one.running_batch, None]
    preemption = {"preemption": {"enabled": False}}
    one.sage = SchedulerState(one, SageConfig.parse({**preemption, **sections}))
    return one


def arrive(scheduler: Any, *requests: Any) -> list[Any]:
    for req in requests:
        req.finished = lambda: False
        scheduler.sage.jobs.arrived(req)
    return list(requests)


def told(scheduler: Any, changes: Any, now_s: float = 0.0, clock: str = CLOCK) -> SettingsNow:
    return switch(scheduler, SetSettings(changes=json.dumps(changes), now_s=now_s, clock=clock))


def queue_of(scheduler: Any, *requests: Any) -> list[Any]:
    scheduler.waiting_queue = arrive(scheduler, *requests)
    return list(scheduler.waiting_queue)


def test_what_waits_is_ordered_by_the_new_policy_and_by_the_old_one_again(scheduler: Any) -> None:
    # The short answer has a long prompt.
    long_answer, short_answer = queue = queue_of(
        scheduler, request([900] * 9), request([10] * 9, prompt=(1,) * 60)
    )
    assert ordered(scheduler.sage, queue) == [short_answer, long_answer]
    answer = told(scheduler, {"schedule_policy": "uniboost"})
    assert answer.refusal == ""
    assert json.loads(answer.settings)["schedule_policy"] == "uniboost"
    assert ordered(scheduler.sage, queue) == [long_answer, short_answer]
    told(scheduler, {"schedule_policy": "sage"})
    assert ordered(scheduler.sage, queue) == [short_answer, long_answer]
    assert scheduler.sage.stats()["num_switches"] == 2
    assert scheduler.sage.stats()["num_policy_errors"] == 0


def test_who_runs_and_who_waits_for_a_grammar_meets_the_new_policy_too(scheduler: Any) -> None:
    running, grammar, finished = arrive(scheduler, *(request([50] * 9) for _ in range(3)))
    scheduler.running_batch.reqs = [running, finished]
    finished.finished = lambda: True
    scheduler.grammar_manager.grammar_queue = [grammar]
    running.output_ids.extend([1] * 30)
    before = finished.sage.job.memo
    told(scheduler, {"schedule_policy": "ssjf"})
    assert running.sage.job.memo == grammar.sage.job.memo == 50.0
    assert finished.sage.job.memo is before
    assert scheduler.sage.jobs.running([running])[0].generated_tokens == 30


def test_a_refused_value_changes_nothing_and_says_why(scheduler: Any) -> None:
    (req,) = queue_of(scheduler, request([50] * 9))
    before = json.loads(told(scheduler, None).settings)
    memo, policy = req.sage.job.memo, scheduler.sage.policy
    for changes, why in (
        ({"schedule_policy": "ssjf", "preemption": {"host_pool_gib": -1}}, "host_pool_gib is -1"),
        ({"schedule_policy": "trail"}, "none was loaded at the start (probe.file)"),
        ({"schedule_policy": "shortest-prefill-first"}, "it needs prefix caching"),
        ({"store": {"capacity": 5}}, "store cannot change while the server runs"),
    ):
        answer = told(scheduler, changes)
        assert why in answer.refusal
        assert json.loads(answer.settings) == before
    assert (req.sage.job.memo, scheduler.sage.policy) == (memo, policy)
    assert scheduler.sage.stats()["num_switches"] == 0


def test_a_policy_that_cannot_be_set_up_leaves_the_old_one(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sage, "__init__", fail)
    policy = scheduler.sage.policy
    assert "cannot be set up: a bug" in told(scheduler, {"policy": {"sage": {}}}).refusal
    assert scheduler.sage.policy is policy


def test_a_promise_stands(scheduler: Any) -> None:
    first, second = queue = queue_of(scheduler, request([900] * 9), request([10] * 9))
    told(scheduler, {"policy": {"sage": {"regret": 0.0}}})  # who comes first, goes first
    assert ordered(scheduler.sage, queue) == [first, second]
    told(scheduler, {"schedule_policy": "ssjf"})
    assert first.sage.job.goes_first
    assert ordered(scheduler.sage, queue) == [first, second]


def test_under_sglangs_order_it_sees_all_by_arrival_and_admits_by_itself(scheduler: Any) -> None:
    reqs = queue_of(scheduler, *(request([10 * i] * 9) for i in range(1, 5)))
    assert scheduler.sage.plans()
    scheduler.waiting_queue = reqs[::-1]
    told(scheduler, {"schedule_policy": "lof"})
    assert scheduler.policy.policy is CacheAgnosticPolicy.LOF
    assert scheduler.waiting_queue == reqs
    assert not scheduler.sage.plans()
    assert scheduler.sage.retention_order(reqs, [2, 0, 1, 3]) == [2, 0, 1, 3]
    told(scheduler, {"schedule_policy": "sage"})
    assert scheduler.policy.policy is CacheAgnosticPolicy.FCFS
    assert scheduler.sage.plans()


def test_deadlines_count_from_when_requests_came(scheduler: Any) -> None:
    hints = encode_hints(Hints(ttft_slo_ms=1000.0))
    early, late, unknown = queue_of(
        scheduler,
        request([9] * 9, {**hints, **encode_asked("a", 70.0, 70.0)}),
        request([9] * 9, {**hints, **encode_asked("a", 95.0, 95.0)}),
        request([9] * 9, {**hints, **encode_asked("a", 5000.0, 5000.0)}),
    )
    told(scheduler, {"schedule_policy": "proserve"}, now_s=100.0)
    assert [req.sage.job.arrival_s for req in (early, late, unknown)] == [70.0, 95.0, 100.0]
    assert scheduler.sage.view(scheduler.running_batch).now_s == 100.0
    # The schedulers' clock is another host's: those requests cannot be dated by it.
    scheduler.sage.jobs.ticked(71.0, "another host's")
    assert [req.sage.job.arrival_s for req in (early, late, unknown)] == [71.0] * 3
    # All ranks date alike before the next tick, too, whichever host each is on.
    told(scheduler, {"schedule_policy": "sage"}, now_s=72.0, clock="another host's")
    assert [req.sage.job.arrival_s for req in (early, late, unknown)] == [72.0] * 3


@pytest.mark.parametrize(
    ("keys", "sent", "is_refused"),
    [
        ((None, None), None, False),
        ((None, "admin"), None, True),
        ((None, "admin"), "Bearer admin", False),
        (("client", "admin"), "Bearer client", True),
        (("client", None), "Bearer client", False),
        (("client", None), None, True),
    ],
)
def test_who_may_change_settings(
    monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str | None, str | None],
    sent: str | None,
    is_refused: bool,
) -> None:
    serving = SimpleNamespace(api_key=keys[0], admin_api_key=keys[1])
    monkeypatch.setattr(settings_route, "get_serving", lambda: serving)
    asked: Any = SimpleNamespace(
        method="POST",
        url=SimpleNamespace(path=settings_route.PATH),
        headers={} if sent is None else {"Authorization": sent},
    )
    assert (settings_route._refused(asked) is not None) is is_refused


def test_messages_cross_processes() -> None:
    message = SetSettings(changes='{"a": [1, "b"]}', now_s=2.5, clock=CLOCK)
    assert msgpack_decode(msgpack_encode(message)) == message
    answer = SettingsNow(settings="{}", refusal="no")
    assert msgpack_decode(msgpack_encode(answer)) == answer


# What is no JSON object, or sets what cannot be; beside each, what is said of it.
HOSTILE_BODIES = {
    b"": "no JSON object of settings",
    b"[]": "no object",
    b"\xff": "no JSON object of settings",
    b"[" * 60_000: "no JSON object of settings",
    b'{"policy":' * 5000 + b"1" + b"}" * 5000: "no JSON object of settings",
    b'{"policy":{"\\ud800":{}}}': "surrogates not allowed",
    b'{"schedule_policy":"\\udfff"}': "surrogates not allowed",
    b'{"preemption":{"host_pool_gib":1' + b"0" * 400 + b"}}": "preemption.host_pool_gib is 1000",
    b'{"preemption":{"host_pool_gib":1' + b"0" * 5000 + b"}}": "no JSON object of settings",
    b'{"preemption":{"host_pool_gib":1e400}}': "preemption.host_pool_gib is inf",
    b'{"preemption":{"max_yields":4}}': "max_yields",
    b'{"policy":{"sage":{"regret":NaN}}}': "policy.sage.regret is nan",
    b'{"admission":{"quantile":0.5}}': "admission",
    b'{"policy":{"proserve":{"eta":1e308}}}': "policy.proserve.eta is 1e+308",
    b'{"policy":{"fastserve":{"quantum_ms":1e-320}}}': "policy.fastserve.quantum_ms is 1e-320",
    b'{"policy":{"sage":{"ttft_ms":"inf"}}}': "",
    b'{"policy":{"sage":{"index":"mean"}}}': "unknown field of section policy.sage 'index'",
}


def test_a_body_too_long_is_read_no_further() -> None:
    num_read = 0

    async def stream() -> AsyncIterator[bytes]:
        nonlocal num_read
        while num_read < 1000:
            num_read += 1
            yield b" " * 1000

    asked: Any = SimpleNamespace(stream=stream)
    with pytest.raises(ValueError, match="more than 65536 bytes"):
        asyncio.run(settings_route.body_of(asked))
    assert num_read == 66


@pytest.mark.parametrize(("body", "why"), HOSTILE_BODIES.items(), ids=range(len(HOSTILE_BODIES)))
def test_what_cannot_be_set_is_refused_with_the_reason_and_no_scheduler_minds_it(
    scheduler: Any, body: bytes, why: str
) -> None:
    try:
        refusal = told(scheduler, settings_route.changes_of(body)).refusal
    except ValueError as error:  # it is not even sent
        refusal = str(error)
    assert why in refusal
    assert bool(refusal) is bool(why)
    assert len(refusal.encode()) < 2000  # it can be an answer
    # Whatever is sent there.
    answer = switch(
        scheduler, SetSettings(changes=body.decode(errors="replace"), now_s=0.0, clock=CLOCK)
    )
    assert bool(answer.refusal) is bool(why)
    msgpack_encode(answer)


def test_a_scheduler_lives_on_whatever_a_switch_raises(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SchedulerState, "go_by", fail)
    assert "a bug" in told(scheduler, {"schedule_policy": "ssjf"}).refusal
    monkeypatch.setattr(Settings, "changed", half_a_character)
    answer = told(scheduler, {"schedule_policy": "ssjf"})
    assert "\\ud800" in answer.refusal
    msgpack_encode(answer)


def half_a_character(*args: object) -> None:
    raise ConfigError("\ud800")
