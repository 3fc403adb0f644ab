"""Time that swapped jobs are away."""

from __future__ import annotations

from dataclasses import replace

from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.swap_out_bound import SwapOutBound
from sage_sched.view import SchedulerView
from tests.sage_sched.situations import said_of, view_of
from tests.sage_sched.strategies import IDLE, decide, job, named


def at(now_s: float, *waiting: Job, running: tuple[Job, ...] = ()) -> SchedulerView:
    away = dict.fromkeys(job for job in waiting if job.generated_tokens)
    return replace(IDLE, now_s=now_s, waiting=waiting, swapped=away, running=running)


def look(bound: SwapOutBound, view: SchedulerView) -> None:
    bound.check(view, list(view.swapped))


def looked(bound: SwapOutBound, left: Job, *times_s: float) -> Job:
    """The job, which was away at these times."""
    for now_s in times_s:
        look(bound, at(now_s, left))
    return left


# The clock may have stood still until the second look.
DUE_S = (0.0, 1.0, 62.0)


def test_a_job_that_was_away_for_too_long_is_due() -> None:
    bound, left, fresh = SwapOutBound(60.0), job(0, age=5), job(1)
    for now_s, is_due in ((3.0, False), (100.0, False), (160.0, False), (160.1, True)):
        look(bound, at(now_s, left, fresh))
        assert left.goes_first is is_due
        assert not fresh.goes_first
    look(bound, at(161.0, fresh))  # it was aborted
    assert not left.goes_first


def test_a_job_that_has_had_a_turn_may_leave_again() -> None:
    bound = SwapOutBound(60.0)
    left = looked(bound, job(0, age=5), *DUE_S)
    for now_s, tokens, is_due in ((70.0, 68, True), (71.0, 69, False)):
        left.grow(tokens)
        look(bound, at(now_s, running=(left,)))
        assert left.goes_first is is_due
    # A new wait begins anew.
    again = looked(bound, job(1, age=5), 100.0, 101.0)
    look(bound, at(150.0, running=(again,)))
    assert not looked(bound, again, 170.0, 180.0, 239.0).goes_first


def test_a_job_that_meets_another_policy_keeps_its_other_promise_alone() -> None:
    left, promised = (looked(SwapOutBound(60.0), job(n, age=5), *DUE_S) for n in range(2))
    promised.pass_starvation_bound()
    for one in (left, promised):
        one.forget_policy()
    assert (left.goes_first, promised.goes_first) == (False, True)


def test_the_clock_is_asked_for_while_a_job_is_away() -> None:
    for bound, asks in ((SwapOutBound(60.0), True), (SwapOutBound(), False)):
        found = [bound.needs_clock]
        for view in (at(0.0, job(0, age=5)), at(1.0)):
            look(bound, view)
            found.append(bound.needs_clock)
        assert found == [False, asks, False]


def test_a_job_that_runs_again_is_no_longer_away() -> None:
    policy, limits = named("fcfs-fill"), Limits(swap_out=SwapOutBound(60.0))
    left, other = job(0, age=5), job(1, age=5)
    for now_s in (0.0, 1.0):
        decide(at(now_s, left, other), policy, limits)
    for now_s in (2.0, 62.0):
        decide(at(now_s, other, running=(left,)), policy, limits)
    assert (left.goes_first, other.goes_first) == (False, True)


def test_others_yield_to_one_that_is_due_under_a_policy_whose_jobs_never_yield() -> None:
    """The last ones do, as many as leave room for the others' next steps."""
    policy, limits = named("fcfs-fill"), Limits(swap_out=SwapOutBound(60.0))
    full = view_of(
        "run 0:100<1000+5=105 1:100<1000+5=105 2:100<1000+5=105; wait 9:100~<1000+5; full"
    )
    for now_s, plan in ((0.0, "9"), (1.0, "9"), (61.0, "9"), (61.1, "-2 -1 ^9")):
        view = replace(full, now_s=now_s)
        assert said_of(decide(view, policy, limits), view) == plan
