"""Levels of urgency: who goes first, and how far the others are overtaken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies.variants import UrgencyArrival
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints, Job
from sage_sched.plan import Preempt
from sage_sched.urgency import Urgency, UrgencyParameters
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.crowd import ROOMY, crowd, overtakings
from tests.sage_sched.strategies import SERVER, decide, full, waiting

POOL = SERVER.kv_pool_tokens
KNOWN = LengthDistribution.from_samples([100, 200], "history")
LONG = LengthDistribution.from_samples([900, 1000], "history")


def policy_of(**parameters: float) -> Urgency:
    return Urgency(UrgencyParameters(**parameters), SERVER)  # type: ignore[arg-type]


def job(
    arrival: int, level: int, came_at: int = 0, known: LengthDistribution = KNOWN, **about: int
) -> Job:
    return Job(arrival, 100, 1000, known, came_at, hints=Hints(urgency=level), **about)


def anew(job: Job) -> Job:
    """The same for another policy."""
    return replace(job, index_state=None, watch=None)


def order(policy: Urgency, *jobs: Job, served_tokens: int = 0) -> list[Job]:
    for each in jobs:
        if each.index_state is None:
            assert policy.on_arrival(each)
    view = waiting(*jobs, served_tokens=served_tokens)
    found = decide(view, policy).order
    assert found is not None
    return [jobs[position] for position in found]


def test_of_those_that_come_together_the_more_urgent_go_first_and_of_a_level_the_shorter() -> None:
    jobs = [
        job(number, level, known=known)
        for number, (level, known) in enumerate(
            [(5, KNOWN), (3, LONG), (3, KNOWN), (2, LONG), (1, LONG), (4, KNOWN)]
        )
    ]
    ordered = order(policy_of(), *jobs)
    assert [each.arrival for each in ordered] == [4, 3, 2, 1, 5, 0]
    by_arrival = order(UrgencyArrival(UrgencyParameters(), SERVER), *map(anew, jobs))
    assert [each.arrival for each in by_arrival] == [4, 3, 1, 2, 5, 0]


def test_a_piece_of_work_is_worth_a_level() -> None:
    old, urgent = job(0, 4, 0, known=LONG), job(1, 2, 2 * POOL - 1)
    assert order(policy_of(), old, urgent) == [urgent, old]
    later = job(1, 2, 3 * POOL)
    assert order(policy_of(), old, later) == [old, later]


def test_a_flood_of_the_most_urgent_goes_ahead_by_two_pieces_of_work() -> None:
    old = job(0, 2, 0, known=LONG)
    flood = [job(number, 1, number * POOL // 5) for number in range(1, 20)]
    assert order(policy_of(), old, *flood).index(old) == 9  # those within two pieces


def roomy(view: SchedulerView, *running: Job) -> SchedulerView:
    """A full batch, of which any job makes room by leaving."""
    return replace(
        full(view, *running),
        holding=lambda job: Holding(job.input_tokens, 0, job.input_tokens + 1000, True),
    )


@pytest.mark.parametrize(
    ("victim", "newcomer", "yields"), [(3, 2, True), (3, 3, False), (2, 1, True), (2, 4, False)]
)
def test_one_yields_to_a_more_urgent_one_alone(victim: int, newcomer: int, yields: bool) -> None:
    policy = policy_of()
    running, comes = job(0, victim, known=LONG, generated_tokens=1), job(1, newcomer)
    for each in (running, comes):
        policy.on_arrival(each)
    plan = decide(roomy(waiting(comes), running), policy)
    assert any(isinstance(action, Preempt) for action in plan.actions) == yields


def test_the_least_urgent_yield_first_and_no_more_than_it_takes() -> None:
    policy = policy_of()
    running = [
        job(number, level, known=LONG, generated_tokens=1) for number, level in enumerate((3, 5, 4))
    ]
    comes = job(3, 2)
    for each in (*running, comes):
        policy.on_arrival(each)
    plan = decide(full(waiting(comes), *running), policy)
    yielding = [act.job for act in plan.actions if isinstance(act, Preempt)]
    assert yielding == [running[1], running[2]]


def test_nobody_yields_who_is_about_to_end_or_to_one_that_has_only_waited_for_longer() -> None:
    policy = policy_of()
    running = job(0, 3, known=LONG, generated_tokens=1)
    old = job(1, 3, 0)
    ending = replace(running, distribution=LengthDistribution.from_samples([2], "history"))
    slow = replace(SERVER, swap_token_s=1.0)
    urgent = job(2, 2)
    for each in (running, old, ending, urgent):
        policy.on_arrival(each)
    running.served_at_arrival_tokens = 5 * POOL  # it is far behind the old one
    assert not decide(roomy(waiting(old), running), policy).actions
    view = replace(roomy(waiting(urgent), ending), server=slow)
    assert not decide(view, policy).actions


def test_prefills_of_the_less_urgent_leave_decode_steps_their_share() -> None:
    policy = policy_of(decode_share=0.75)
    urgent, later = job(0, 2, generated_tokens=5), job(1, 4)
    for each in (urgent, later):
        policy.on_arrival(each)
    step_time = SERVER.step_time
    decode_s = step_time.decode_s(1, 105)
    view = replace(waiting(later), running=[urgent])
    served = 0
    passes = []
    for _ in range(40):
        plan = decide(replace(view, served_tokens=served), policy)
        passes.append(plan.decode_only)
        served += 1 if plan.decode_only else 400
    prefill_s = step_time.prefill_s(1, 400, 0)
    between = passes.index(False, 1)
    assert not passes[0]
    assert 0.75 <= (between - 1) * decode_s / ((between - 1) * decode_s + prefill_s) < 0.85


def test_prefills_are_not_held_back_for_anybody_as_urgent_or_if_nobody_is() -> None:
    for running_level, waiting_level in [(2, 2), (3, 5), (2, 1)]:
        policy = policy_of(decode_share=1.0)
        runs, comes = job(0, running_level, generated_tokens=5), job(1, waiting_level)
        for each in (runs, comes):
            policy.on_arrival(each)
        plan = decide(replace(waiting(comes), running=[runs]), policy)
        assert not plan.decode_only


def test_who_finds_no_room_for_its_adapter_does_not_let_others_prefill() -> None:
    policy = policy_of(decode_share=1.0)
    runs, passed, comes = job(0, 2, generated_tokens=5), job(1, 1), job(2, 4)
    for each in (runs, passed, comes):
        policy.on_arrival(each)
    view = replace(waiting(passed, comes), running=[runs])
    assert not decide(view, policy).decode_only
    assert decide(replace(view, has_adapter=lambda place: place != 0), policy).decode_only


@pytest.mark.parametrize("urgencies", [(1, 2, 3, 4, 5), (1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5)])
def test_no_request_is_overtaken_by_more_than_the_bound(urgencies: tuple[int, ...]) -> None:
    piece_tokens, num_overtaken = 200, 0
    for seed in range(20):
        pool_tokens = ROOMY.kv_pool_tokens
        parameters = UrgencyParameters(level_pools=piece_tokens / pool_tokens)
        policy = Urgency(parameters, ROOMY.server_facts())
        for admitted, waits in overtakings(policy, crowd(seed, urgencies=urgencies)):
            later = admitted.served_at_arrival_tokens - waits.served_at_arrival_tokens
            assert later <= waits.hints.urgency * piece_tokens
            num_overtaken += later > 0
    assert num_overtaken > 500
