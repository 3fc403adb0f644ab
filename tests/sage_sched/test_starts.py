"""Starts of waiting requests under sage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints, Job
from sage_sched.plan import Admit, Plan, Preempt, Resume
from sage_sched.policies.sage import Sage, SageParameters
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import SERVER, decide, waiting


def job(arrival: int, *, age: int = 0, length: int = 400, **fields: float) -> Job:
    known = LengthDistribution.from_samples([length] * 50, "history")
    made = Job(arrival, 100, 4096, known, 0, **fields)  # type: ignore[arg-type]
    made.grow(age)
    return made


class Server:
    """Ten running requests with long answers on ten slots, a swapped one, and newcomers."""

    def __init__(self, ttft_ms: float = 2000.0, regret: float = math.inf) -> None:
        self.policy = Sage(SageParameters(ttft_ms=ttft_ms, regret=regret), SERVER)
        self.running = [self.met(job(n, age=100, length=2000)) for n in range(10)]
        self.swapped = self.met(job(10, age=100))
        self.queue = [self.swapped]
        self.num_planned = -1

    def met(self, one: Job) -> Job:
        one.is_ranked = self.policy.on_arrival(one)
        return one

    def comes(self, at_s: float, **fields: int) -> Job:
        number = len(self.running) + len(self.queue)
        self.queue.append(self.met(job(number, arrival_s=at_s, **fields)))
        return self.queue[-1]

    def plan(self, now_s: float, **fields: object) -> Plan:
        view: SchedulerView = replace(
            waiting(*self.queue),
            now_s=now_s,
            running=self.running,
            swapped={self.swapped: None},
            batch_is_full=True,
            free_slots=0,
            pass_tokens=8192,
            holding=lambda running: Holding(200, 0, 200, True),
        )
        view = replace(view, num_arrivals_planned=self.num_planned)
        self.num_planned = view.num_arrivals
        return decide(replace(view, **fields), self.policy)

    def started(self, now_s: float, **fields: object) -> list[Job]:
        actions = self.plan(now_s, **fields).actions
        return [action.job for action in actions if type(action) is Admit]


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


def test_while_requests_gather_preempted_ones_come_back_first() -> None:
    server = Server()
    server.comes(0.0, length=5)
    plan = server.plan(0.0, free_slots=1, batch_is_full=False)
    assert [type(action) for action in plan.actions] == [Resume]
    assert plan.order == [0, 1]


def test_a_start_preempts_those_whose_index_exceeds_its_price() -> None:
    server = Server()
    server.comes(0.0)
    server.plan(0.0)
    plan = server.plan(1.5)
    assert [type(action) for action in plan.actions] == [Preempt, Admit]


def test_a_move_of_seconds_is_not_worth_a_first_token() -> None:
    server = Server()
    server.comes(0.0)
    slow = replace(SERVER, swap_token_s=0.05)
    server.plan(0.0, server=slow)
    assert not server.plan(1.5, server=slow).actions


def test_a_start_that_is_due_enters_a_full_batch_that_has_room() -> None:
    server = Server()
    fresh = server.comes(0.0)
    server.plan(0.0)
    plan = server.plan(1.5, free_slots=3)
    assert [(type(action), action.job) for action in plan.actions] == [(Admit, fresh)]


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


def test_a_request_that_is_late_goes_by_its_index() -> None:
    server = Server()
    server.comes(0.0)
    assert server.started(2.5) == []


def test_a_long_prompt_that_is_mostly_cached_is_not_late() -> None:
    server = Server()
    cached = server.met(Job(11, 30_000, 4096, server.swapped.distribution, 0))
    server.queue.append(cached)
    for _ in range(2):  # the first plan finds out
        server.plan(0.0, cached_tokens=lambda position: 29_900 * position)
    assert server.started(server.policy.plan_by_s, free_slots=1, free_tokens=40_000) == [cached]


def test_nobody_is_held_back_where_running_requests_may_not_leave() -> None:
    server = Server()
    short = server.comes(0.0, length=5)
    order = server.plan(0.1, may_preempt=False).order or ()
    assert server.queue[order[0]] is short


def test_running_requests_yield_to_one_that_is_promised_its_turn_at_any_price() -> None:
    server = Server()
    late = server.comes(-100.0, length=4000)
    late.pass_starvation_bound()
    slow = replace(SERVER, swap_token_s=0.05)
    actions = server.plan(0.0, server=slow).actions
    assert [type(action) for action in actions] == [Preempt, Admit]
    assert actions[1].job is late
    # No job with a TPOT target or a promise is preempted.
    for running in server.running[:5]:
        running.hints = Hints(tpot_slo_ms=50.0)
    for running in server.running[5:]:
        running.pass_starvation_bound()
    server.num_planned = -1
    assert not server.plan(0.0, server=slow).actions
