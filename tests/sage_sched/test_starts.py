"""Starts of waiting requests under sage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sage_sched.job import BEHIND, Hints, Job
from sage_sched.plan import Admit, Plan, Preempt, Resume
from sage_sched.policies.sage import Sage, SageParameters
from sage_sched.steps import attended_pairs
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import SERVER, decide, job, waiting


class Server:
    """Ten running requests with long answers on ten slots, a swapped one, and newcomers."""

    def __init__(self, ttft_ms: float = 2000.0) -> None:
        self.policy = Sage(SageParameters(ttft_ms=ttft_ms, regret=math.inf), SERVER)
        self.running = [self.met(n, length=2000, age=100) for n in range(10)]
        self.swapped = self.met(10, age=100)
        self.queue = [self.swapped]
        self.num_planned = -1

    def met(self, arrival: int, input_tokens: int = 100, length: int = 400, **about: object) -> Job:
        made = job(arrival, input_tokens, lengths=(length,), **about)  # type: ignore[arg-type]
        made.is_ranked = self.policy.on_arrival(made)
        return made

    def comes(self, at_s: float, **about: object) -> Job:
        self.queue.append(self.met(10 + len(self.queue), arrival_s=at_s, **about))  # type: ignore[arg-type]
        return self.queue[-1]

    def plan(self, now_s: float, **facts: object) -> Plan:
        view: SchedulerView = replace(
            waiting(*self.queue),
            now_s=now_s,
            running=self.running,
            swapped={self.swapped: None},
            batch_is_full=True,
            free_slots=0,
            pass_tokens=8192,
            holding=lambda running: Holding(200, 0, 200, True),
            num_arrivals_planned=self.num_planned,
        )
        self.num_planned = view.num_arrivals
        return decide(replace(view, **facts), self.policy)

    def started(self, now_s: float, **facts: object) -> list[Job]:
        actions = self.plan(now_s, **facts).actions
        return [action.job for action in actions if type(action) is Admit]


def test_requests_set_behind_do_not_start_early() -> None:
    alone, beside = Server(), Server()
    for _ in range(20):
        beside.comes(0.0, level=BEHIND)
    for server in (alone, beside):
        newcomer = server.comes(0.0)
        assert server.started(0.0) == []
        assert server.policy.plan_by_s == pytest.approx(alone.policy.plan_by_s)
        assert server.started(server.policy.plan_by_s) == [newcomer]


def kinds(plan: Plan) -> list[type]:
    return [type(action) for action in plan.actions]


def test_requests_start_together_and_before_the_first_would_be_late() -> None:
    server = Server()
    first = server.comes(0.0)
    server.plan(0.0)
    due_s = server.policy.plan_by_s
    assert 0.0 < due_s < 2.0
    second = server.comes(due_s / 2)
    assert server.started(due_s / 2) == []
    # The more wait, the sooner.
    assert server.policy.plan_by_s < due_s
    assert server.started(due_s) == [first, second]


def test_a_start_leaves_time_for_the_steps_before_and_after_it() -> None:
    server, slow = Server(), replace(SERVER.step_time, prefill_base_s=0.5, decode_base_s=0.1)
    server.comes(0.0, length=4000)
    server.plan(0.0, server=replace(SERVER, step_time=slow))
    most_s = 2.0 - slow.prefill_s(1, 100, attended_pairs(0, 100)) - 2 * slow.decode_s(10, 0)
    assert 0.0 < server.policy.plan_by_s <= most_s


def test_while_requests_gather_preempted_ones_come_back_first() -> None:
    server = Server()
    server.comes(0.0, length=5)
    plan = server.plan(0.0, free_slots=1, batch_is_full=False)
    assert kinds(plan) == [Resume]
    assert plan.order == [0, 1]


@pytest.mark.parametrize(
    ("at_s", "facts", "actions"),
    [
        (1.5, {}, [Preempt, Admit]),  # a running one's index exceeds the price
        (1.5, {"server": replace(SERVER, swap_token_s=0.05)}, []),  # a move of seconds
        (1.5, {"free_slots": 3}, [Admit]),
        (2.5, {}, []),  # it is late, and goes by its index
    ],
)
def test_a_start_is_worth_what_it_costs(
    at_s: float, facts: dict[str, object], actions: list[type]
) -> None:
    server = Server()
    server.comes(0.0)
    server.plan(0.0, **facts)
    assert kinds(server.plan(at_s, **facts)) == actions


@pytest.mark.parametrize("ttft_ms", [math.inf, 50.0])
def test_without_a_target_that_can_be_met_a_request_goes_by_its_index(ttft_ms: float) -> None:
    server = Server(ttft_ms)
    short, long = server.comes(0.0, length=5), server.comes(0.0, length=4000)
    for now_s in (0.0, 1.0, 100.0):
        server.num_planned = -1
        plan = server.plan(now_s)
        assert not plan.actions
        order = plan.order or ()
        assert [server.queue[p] for p in order] == [short, server.swapped, long]
        assert server.policy.plan_by_s == math.inf


def test_a_long_prompt_that_is_mostly_cached_is_not_late() -> None:
    server = Server()
    cached = server.comes(0.0, input_tokens=30_000)
    for _ in range(2):  # the first plan finds out
        server.plan(0.0, cached_tokens=lambda position: 29_900 * position)
    assert server.started(server.policy.plan_by_s, free_slots=1, free_tokens=40_000) == [cached]


def test_no_request_is_held_back_where_running_requests_may_not_leave() -> None:
    server = Server()
    short = server.comes(0.0, length=5)
    order = server.plan(0.1, may_preempt=False).order or ()
    assert server.queue[order[0]] is short


def test_running_requests_yield_to_one_that_is_promised_its_turn_at_any_price() -> None:
    server, slow = Server(), replace(SERVER, swap_token_s=0.05)
    late = server.comes(-100.0, length=4000)
    late.pass_starvation_bound()
    plan = server.plan(0.0, server=slow)
    assert kinds(plan) == [Preempt, Admit]
    assert plan.actions[1].job is late
    # No job with a TPOT target or a promise is preempted.
    for running in server.running[:5]:
        running.hints = Hints(tpot_slo_ms=50.0)
    for running in server.running[5:]:
        running.pass_starvation_bound()
    server.num_planned = -1
    assert not server.plan(0.0, server=slow).actions
