"""What one request computes right now, no other computes beside it."""

from __future__ import annotations

from dataclasses import replace

from sage_sched.job import Job
from sage_sched.plan import Admit
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import waiting
from tests.sage_sched.test_decide import decided, job


def sharing(num_tokens: int, view: SchedulerView, *jobs: Job) -> SchedulerView:
    """A view in which these jobs alone begin with the same tokens; a pass has room for them all."""

    def common_tokens(position: int, other: int | Job) -> int:
        pair = (view.waiting[position], view.waiting[other] if isinstance(other, int) else other)
        return num_tokens if all(each in jobs for each in pair) else 0

    return replace(view, common_tokens=common_tokens, pass_tokens=8000)


def entering(view: SchedulerView) -> list[Job]:
    plan = decided(view)
    assert plan.num_open == 0
    return [action.job for action in plan.actions if isinstance(action, Admit)]


def test_the_second_of_two_with_one_beginning_waits_for_the_first() -> None:
    first, twin, other = job(0, 2000), job(1, 2100), job(2, 2200)
    view = sharing(1900, waiting(first, twin, other), first, twin)
    assert entering(view) == [first, other]
    assert not decided(view).is_new  # so that the next pass plans again
    first.grow(1)
    assert entering(sharing(1900, replace(view, waiting=[twin], running=[first]), first, twin)) == [
        twin
    ]


def test_it_waits_too_for_one_that_has_no_token_yet() -> None:
    first, twin, other = job(0, 2000), job(1, 2100), job(2, 2200)
    view = replace(waiting(twin, other), running=[first])
    assert entering(sharing(1900, view, first, twin)) == [other]


def test_it_waits_too_for_what_is_left_of_a_chunked_prompt() -> None:
    chunked, twin, other = job(0, 5000, prefilled_tokens=1000), job(1, 2100), job(2, 2200)
    view = replace(waiting(twin, other), chunked=chunked, pass_tokens=8000)
    assert entering(sharing(1900, view, chunked, twin)) == [other]
    assert entering(sharing(1100, view, chunked, twin)) == [twin, other]


def test_nobody_waits_for_what_is_cached_or_quick_to_compute() -> None:
    first, twin = job(0, 2000), job(1, 2100)
    view = sharing(1900, waiting(first, twin), first, twin)
    assert entering(sharing(20, view, first, twin)) == [first, twin]
    assert entering(replace(view, cached_tokens=lambda position: 1900)) == [first, twin]


def test_nobody_waits_for_a_twin_that_waits_itself() -> None:
    """Two documents in one: the third shares with the second what that does not compute now."""
    first, second, third = job(0, 2000), job(1, 2100), job(2, 2200)
    pairs: dict[tuple[int, int | Job], int] = {(1, 0): 1000, (2, 1): 1000}
    view = replace(
        waiting(first, second, third),
        common_tokens=lambda position, other: pairs.get((position, other), 0),
        pass_tokens=8000,
    )
    assert entering(view) == [first, third]


def test_one_that_is_promised_its_turn_never_waits() -> None:
    first, twin = job(0, 2000), job(1, 2100)
    for each in (first, twin):
        each.pass_starvation_bound()
    view = sharing(1900, waiting(first, twin), first, twin)
    assert entering(view) == [first, twin]
