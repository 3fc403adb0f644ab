"""Who yields to whom, on cases made by hand: a job's key is its arrival, the waiting ones lead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from sage_sched.job import Job
from sage_sched.plan import PreemptionMode
from sage_sched.policy import NoParameters, Policy
from sage_sched.preemption import plan_admissions
from sage_sched.preemption_cost import PreemptionCost
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import IDLE, SERVER


class ByInput(Policy):
    """The shortest prompt first; one of half the length may push another out in under a second."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return float(job.input_tokens)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return 2 * waiting.input_tokens <= running.input_tokens and price_s < 1


POLICY = ByInput(NoParameters(), SERVER)
# A newcomer, and who yields to it.
Planned = tuple[Job, tuple[Job, ...]]


def job(key: int, num_preemptions: int = 0) -> Job:
    return Job(key, key, 10, None, 0, num_preemptions=num_preemptions)


class Holder(NamedTuple):
    """A running job and what its leaving frees."""

    job: Job
    freed_tokens: int


def plan(
    running: list[Holder],
    waiting: list[tuple[Job, int]],
    free_slots: int = 1,
    free_tokens: int = 0,
    move_s: Callable[[Job], float | None] = lambda job: 0.0,
    swapped: Sequence[Job] = (),
) -> list[Planned]:
    freed_tokens = dict(running)

    def cost_of(job: Job) -> PreemptionCost | None:
        price_s = move_s(job)
        return (
            None
            if price_s is None
            else PreemptionCost(PreemptionMode.SWAP, price_s, freed_tokens[job])
        )

    turns = plan_admissions(
        freed_tokens,
        waiting,
        free_slots=free_slots,
        free_tokens=free_tokens,
        prefill_tokens=IDLE.pass_tokens,
        policy=POLICY,
        view=replace(IDLE, swapped=swapped),
        max_preemptions=2,
        cost_of=cost_of,
    )
    return [(turn.newcomer, tuple(victim.job for victim in turn.victims)) for turn in turns]


def test_a_swapped_job_waits_for_all_that_the_engine_reserves_for_prompts_before_it() -> None:
    """The tokens of a recomputed answer count twice there."""
    recomputed, swapped = job(1), job(2)
    recomputed.generated_tokens = 100
    waiting = [(recomputed, 150), (swapped, 50)]
    assert plan([], waiting, 2, free_tokens=300, swapped=[swapped]) == [(recomputed, ())]
    assert len(plan([], waiting, 2, free_tokens=301, swapped=[swapped])) == 2
    # Of prompts the engine itself finds out which have room.
    assert len(plan([], waiting, 2, free_tokens=201)) == 2


def test_nobody_yields_where_there_is_room() -> None:
    newcomer = job(1)
    turns = plan([Holder(job(100), 50)], [(newcomer, 20)], free_tokens=21)
    assert turns == [(newcomer, ())]


def test_the_worst_key_yields_first_and_no_more_than_needed() -> None:
    worst, middle, best = (Holder(job(key), 50) for key in (300, 200, 100))
    newcomer = job(1)
    assert plan([best, worst, middle], [(newcomer, 49)]) == [(newcomer, (worst.job,))]
    both = plan([best, worst, middle], [(newcomer, 50)])
    assert both == [(newcomer, (worst.job, middle.job))]


def test_one_that_a_later_one_makes_superfluous_stays() -> None:
    small, large = Holder(job(300), 10), Holder(job(200), 80)
    newcomer = job(1)
    assert plan([small, large], [(newcomer, 60)]) == [(newcomer, (large.job,))]


def test_nobody_yields_to_one_that_does_not_get_in_even_so() -> None:
    assert plan([Holder(job(300), 10)], [(job(1), 60), (job(2), 5)]) == []


def test_only_those_that_the_policy_lets_yield() -> None:
    near, far = Holder(job(15), 50), Holder(job(20), 50)
    newcomer = job(10)
    assert plan([near, far], [(newcomer, 40)]) == [(newcomer, (far.job,))]
    assert plan([near], [(newcomer, 40)]) == []


def test_not_one_whose_move_costs_too_much_and_not_one_that_cannot_move() -> None:
    dear, fixed, cheap = (Holder(job(key), 50) for key in (300, 200, 100))
    prices_s = {dear.job: 1.0, fixed.job: None, cheap.job: 0.5}
    newcomer = job(1)
    turns = plan([dear, fixed, cheap], [(newcomer, 40)], move_s=prices_s.__getitem__)
    assert turns == [(newcomer, (cheap.job,))]


def test_who_has_yielded_often_enough_stays() -> None:
    tired, fresh = Holder(job(300, num_preemptions=2), 50), Holder(job(200, num_preemptions=1), 50)
    newcomer = job(1)
    assert plan([tired, fresh], [(newcomer, 40)]) == [(newcomer, (fresh.job,))]


@pytest.mark.parametrize(("free_slots", "expected"), [(0, True), (1, False)])
def test_one_that_frees_nothing_of_what_is_short_stays(free_slots: int, expected: bool) -> None:
    # It has no tokens: it can give its slot alone.
    newcomer = job(1)
    needed = 5 if expected else 50
    turns = plan([Holder(job(300), 0)], [(newcomer, needed)], free_slots, free_tokens=20)
    assert bool(turns) == expected


def test_turns_share_what_is_free_and_no_one_yields_twice() -> None:
    worst, middle = Holder(job(300), 50), Holder(job(200), 50)
    first, second, third = job(1), job(2), job(3)
    waiting = [(each, 40) for each in (first, second, third)]
    turns = plan([middle, worst], waiting, free_slots=0)
    assert turns == [(first, (worst.job,)), (second, (middle.job,))]
