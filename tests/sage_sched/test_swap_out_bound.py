"""How long jobs that left the device are away."""

from __future__ import annotations

from dataclasses import replace

from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.plan import Preempt, Resume
from sage_sched.policy import FcfsFill, NoParameters
from sage_sched.swap_out_bound import SwapOutBound
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import IDLE, SERVER, decide


def job(arrival: int, generated_tokens: int = 5) -> Job:
    found = Job(arrival, 100, 1000, None, 0)
    found.grow(generated_tokens)
    return found


def at(now_s: float, *waiting: Job, running: tuple[Job, ...] = ()) -> SchedulerView:
    away = dict.fromkeys(job for job in waiting if job.generated_tokens)
    return replace(IDLE, now_s=now_s, waiting=waiting, swapped=away, running=running)


def look(away: SwapOutBound, view: SchedulerView) -> None:
    away.look(view, list(view.swapped))


def test_who_was_away_for_so_long_is_due() -> None:
    away, left, fresh = SwapOutBound(60.0), job(0), job(1, generated_tokens=0)
    # The clock may have stood still until the second look.
    for now_s in (3.0, 100.0, 160.0):
        look(away, at(now_s, left, fresh))
        assert not left.goes_first
    look(away, at(160.1, left, fresh))
    assert left.goes_first
    assert not fresh.goes_first


def test_who_has_had_a_turn_may_leave_again() -> None:
    away, left = SwapOutBound(60.0), job(0)
    for now_s in (0.0, 1.0, 62.0):
        look(away, at(now_s, left))
    left.grow(68)
    look(away, at(70.0, running=(left,)))
    assert left.goes_first
    left.grow(69)
    look(away, at(71.0, running=(left,)))
    assert not left.goes_first
    # And what it was promised otherwise stays.
    left.pass_starvation_bound()
    assert left.goes_first


def test_who_ends_in_its_turn_is_forgotten() -> None:
    away = SwapOutBound(60.0)
    for number in range(3):
        left = job(number)
        for now_s in (0.0, 1.0, 62.0):
            look(away, at(1000 * number + now_s, left))
        assert left.goes_first
        look(away, at(1000 * number + 63.0))
    assert not away._stays_until


def test_another_policy_meets_nobody_who_is_due() -> None:
    away, left = SwapOutBound(60.0), job(0)
    for now_s in (0.0, 1.0, 62.0):
        look(away, at(now_s, left))
    left.forget_policy()
    assert not left.goes_first


def test_a_new_wait_is_a_new_one() -> None:
    away, left = SwapOutBound(60.0), job(0)
    look(away, at(0.0, left))
    look(away, at(1.0, left))
    look(away, at(50.0, running=(left,)))
    for now_s in (70.0, 80.0, 139.0):
        look(away, at(now_s, left))
        assert not left.goes_first


def test_the_clock_is_asked_for_only_while_somebody_is_away() -> None:
    away, unbound = SwapOutBound(60.0), SwapOutBound()
    for one, asks in ((away, True), (unbound, False)):
        assert not one.needs_clock
        look(one, at(0.0, job(0)))
        assert one.needs_clock is asks
        look(one, at(1.0))
        assert not one.needs_clock


def test_others_yield_to_who_is_due_under_a_policy_whose_jobs_never_yield() -> None:
    policy = FcfsFill(NoParameters(), SERVER)
    limits = Limits(swap_out=SwapOutBound(60.0))
    running, left = tuple(job(i) for i in range(3)), job(9)
    full = replace(
        at(0.0, left, running=running),
        free_slots=0,
        batch_is_full=True,
        free_tokens=0,
        holding=lambda job: Holding(105, 0, 105, stays_whole=False),
    )
    for now_s in (0.0, 1.0, 61.0):
        assert decide(replace(full, now_s=now_s), policy, limits).actions == ()
    actions = decide(replace(full, now_s=61.1), policy, limits).actions
    assert [type(action) for action in actions[-1:]] == [Resume]
    # The last ones, as many as leave room for the others' next steps.
    assert [action.job for action in actions if isinstance(action, Preempt)] == [*running[:0:-1]]
