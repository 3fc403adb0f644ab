"""Time that swapped jobs are away."""

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


def looked(away: SwapOutBound, left: Job, *times_s: float) -> Job:
    """The job, which was away at these times."""
    for now_s in times_s:
        look(away, at(now_s, left))
    return left


def look(away: SwapOutBound, view: SchedulerView) -> None:
    away.look(view, list(view.swapped))


# The clock may have stood still until the second look.
DUE_S = (0.0, 1.0, 62.0)


def test_a_job_that_was_away_for_too_long_is_due() -> None:
    away, left, fresh = SwapOutBound(60.0), job(0), job(1, generated_tokens=0)
    for now_s, is_due in ((3.0, False), (100.0, False), (160.0, False), (160.1, True)):
        look(away, at(now_s, left, fresh))
        assert left.goes_first is is_due
        assert not fresh.goes_first


def test_a_job_that_has_had_a_turn_may_leave_again() -> None:
    away = SwapOutBound(60.0)
    left = looked(away, job(0), *DUE_S)
    for now_s, tokens, is_due in ((70.0, 68, True), (71.0, 69, False)):
        left.grow(tokens)
        look(away, at(now_s, running=(left,)))
        assert left.goes_first is is_due
    # Another promise stays.
    left.pass_starvation_bound()
    assert left.goes_first
    # A new wait begins anew.
    again = looked(away, job(1), 100.0, 101.0)
    look(away, at(150.0, running=(again,)))
    assert not looked(away, again, 170.0, 180.0, 239.0).goes_first


def test_a_job_that_ends_or_meets_another_policy_is_forgotten() -> None:
    away = SwapOutBound(60.0)
    for number in range(3):
        assert looked(away, job(number), *(1000 * number + s for s in DUE_S)).goes_first
        look(away, at(1000 * number + 63.0))
    assert not away._stays_until
    left = looked(away, job(3), *(9000 + s for s in DUE_S))
    left.forget_policy()
    assert not left.goes_first


def test_the_clock_is_asked_for_while_a_job_is_away() -> None:
    for bound, asks in ((SwapOutBound(60.0), True), (SwapOutBound(), False)):
        found = [bound.needs_clock]
        for view in (at(0.0, job(0)), at(1.0)):
            look(bound, view)
            found.append(bound.needs_clock)
        assert found == [False, asks, False]


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
