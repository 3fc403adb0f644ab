"""Policies raise once. Later passes order all jobs, and keep nothing of the failure."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sage_sched.headroom import Headroom
from sage_sched.job import BatchPart, Hints, Job
from sage_sched.limits import Limits
from sage_sched.scheduler import Scheduler
from sage_sched.starvation_bound import StarvationBound
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import SERVER, StandInKv, job, named, waiting

SOON = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0)


class Server:
    """A scheduler that survives its policy's errors, and the tasks that failed."""

    def __init__(self, name: str, regret: float = 32.0) -> None:
        self.policy, self.failed = named(name), list[str]()
        headroom = Headroom(0, 1, SERVER.kv_pool_tokens)
        limits = Limits([StarvationBound(regret)])
        self.core = Scheduler(self.policy, limits, headroom, self.failed.append)

    def come(self, *jobs: Job) -> None:
        for one in jobs:
            self.core.arrived(one)

    def order(self, view: SchedulerView) -> list[int]:
        self.core.now_s = view.now_s
        return [view.waiting[position].arrival for position in self.core.plan(view).order]


def fails_at(number: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, made to raise in the call of this number."""
    calls = 0

    def once(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise RuntimeError("once")
        return method(*given, **named)

    return once


def test_a_job_that_could_not_be_ranked_goes_first_and_fails_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, others = Server("sage"), [job(number, lengths=(50,)) for number in (1, 2, 3)]
    unranked = job(0, lengths=(50,))
    monkeypatch.setattr(server.policy, "rank", fails_at(1, server.policy.rank))
    server.come(unranked, *others)
    assert server.failed == ["rank a request"]
    assert server.order(waiting(unranked)) == [0]
    assert server.order(waiting(*others[::-1], unranked)) == [0, 1, 2, 3]
    unranked.grow(3)
    server.order(replace(waiting(*others), running=[unranked], now_s=0.1))
    assert server.policy.lasting(unranked).steps > 0
    assert len(server.failed) == 1


def test_a_job_ranked_at_its_look_up_takes_no_other_from_the_order_as_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, jobs = Server("proserve"), [job(n, 100, lengths=(50,), hints=SOON) for n in range(4)]
    monkeypatch.setattr(server.policy, "_worth", fails_at(1, server.policy._worth))  # type: ignore[attr-defined]
    server.come(*jobs)
    kv = StandInKv(cached=lambda job: (8, 0))
    server.order(replace(waiting(*jobs), kv=kv))
    for _ in range(2):
        assert server.order(replace(waiting(*jobs[1:]), kv=kv)) == [1, 2, 3]
    assert server.failed == ["rank a request"]


def test_newcomers_that_a_policy_failed_to_take_in_stay_in_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, jobs = Server("proserve"), [job(n, 100, lengths=(50,), hints=SOON) for n in range(4)]
    server.come(*jobs)
    policy: Any = server.policy
    monkeypatch.setattr(policy, "_bring_up_to_date", fails_at(2, policy._bring_up_to_date))
    for _ in range(3):
        assert sorted(server.order(waiting(*jobs))) == [0, 1, 2, 3]


def test_a_start_is_no_longer_due_after_a_pass_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    server, new = Server("sage"), job(50, lengths=(50,))
    running = [job(number, lengths=(3000,), age=3) for number in range(30)]
    server.come(*running, new)

    def view(now_s: float) -> SchedulerView:
        about: dict[str, Any] = {"running": running, "room_tokens": 0, "free_slots": 0}
        return replace(waiting(new), now_s=now_s, batch_is_full=True, **about)

    server.order(view(0.5))
    assert new.starts_now
    with monkeypatch.context() as patch:
        patch.setattr(server.policy._starts, "_gather", lambda view: 1 // 0)  # type: ignore[attr-defined]
        server.order(view(0.6))
    assert (server.failed, new.starts_now) == (["plan a pass"], False)


def test_a_policy_that_always_fails_keeps_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("sage")
    monkeypatch.setattr(type(server.policy), "on_pass", lambda self, view, queue: 1 // 0)
    alive = weakref.WeakSet[Job]()
    for number in range(50):
        new = job(number, lengths=(50,))
        alive.add(new)
        server.come(new)
        server.order(waiting(new))
        server.core.ended(new)
        del new
    gc.collect()
    assert len(alive) < 5


def test_a_job_past_its_bound_is_in_the_order_of_that_pass_among_any_number_of_newcomers() -> None:
    server, first = Server("fcfs-fill", regret=1.0), job(0)
    server.come(first)
    server.order(replace(waiting(), running=[first], num_arrivals=1))
    others, late, later = [job(n, 1) for n in range(1, 65)], job(70, 1), job(300)
    later.served_tokens = 5000
    later.grow(3)
    server.come(*others, late, later)
    view = replace(waiting(*others, late, later), running=[first], served_tokens=5000)
    assert late.arrival in server.order(view)
    assert late.goes_first


def test_an_empty_prompt_of_a_batch_is_work_too() -> None:
    server = Server("sage")
    server.come(job(0, 0, lengths=(50,), batch=BatchPart("b", 2, 10.0)))
    assert server.order(waiting(job(1, lengths=(50,)))) == [1]
