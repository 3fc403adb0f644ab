"""Who yields as memory runs out, and which way."""

from __future__ import annotations

from dataclasses import replace

from sage_sched.job import Job
from sage_sched.plan import Plan, Preempt, PreemptionMode
from sage_sched.policy import NoParameters
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import SERVER, decide, waiting
from tests.sage_sched.test_decide import ByInput

# Free, so that the headroom is the smallest that there is: 8 steps.
FREE = replace(SERVER, swap_token_s=0.0)


def job(arrival: int, input_tokens: int = 100, **about: object) -> Job:
    return Job(arrival, input_tokens, 4000, None, 0, generated_tokens=5, **about)  # type: ignore[arg-type]


def short(*running: Job, **about: object) -> SchedulerView:
    """Those who run fill the pool, and somebody waits."""
    view = replace(
        waiting(job(99, 1)),
        running=running,
        free_tokens=0,
        step_tokens=len(running),
        server=FREE,
        holding=lambda one: Holding(one.input_tokens, 0, one.input_tokens, False),
    )
    return replace(view, **about)  # type: ignore[arg-type]


def decided(view: SchedulerView) -> Plan:
    return decide(view, ByInput(NoParameters(), FREE))


def yielding(view: SchedulerView) -> list[Job]:
    actions = decided(view).actions
    assert all(isinstance(each, Preempt) and each.to is None for each in actions)
    return [each.job for each in actions]


def test_the_last_of_the_order_yields_and_nobody_enters() -> None:
    first, last, middle = job(0, 50), job(1, 300), job(2, 200)
    view = short(first, last, middle)
    plan = decided(view)
    assert plan.actions == (
        Preempt(last, PreemptionMode.SWAP, "memory runs out, and it is the last of the order"),
    )
    assert (plan.num_open, plan.decode_only) == (0, False)
    fits = decided(replace(view, free_tokens=3))  # there is room for a step
    assert not any(isinstance(each, Preempt) and each.to is None for each in fits.actions)


def test_as_many_yield_as_it_takes_for_the_headroom_of_the_others() -> None:
    running = [job(number, 10 + number) for number in range(10)]
    gone = yielding(short(*running))
    # Each gives back what it holds, and the others need 8 tokens each.
    assert gone == running[: -len(gone) - 1 : -1]
    left = running[: -len(gone)]
    assert sum(one.input_tokens for one in gone) >= 8 * len(left)
    assert sum(one.input_tokens for one in gone[:-1]) < 8 * (len(left) + 1)


def test_one_goes_on_whatever_is_short() -> None:
    running = [job(number, 1) for number in range(3)]
    assert yielding(short(*running)) == [running[2], running[1]]
    alone = short(running[0])
    assert decided(alone).actions == ()


def test_a_prompt_that_is_chunked_goes_on_in_the_place_of_all() -> None:
    chunked = job(5, 500, prefilled_tokens=100)
    running = [job(number, 1) for number in range(3)]
    view = short(*running, chunked=chunked, free_tokens=150, pass_tokens=400)
    assert {*yielding(view)} == {*running}
    # The next chunk takes less than there is.
    assert not any(
        isinstance(each, Preempt) for each in decided(replace(view, pass_tokens=128)).actions
    )


def test_those_who_are_promised_their_turn_yield_last() -> None:
    promised, other = job(0, 3000, passed_starvation_bound=True), job(1, 100)
    late = job(2, 4000, passed_starvation_bound=True)
    assert yielding(short(promised, other)) == [other]
    assert yielding(short(promised, other, late))[:2] == [other, late][:1]


def test_those_that_have_to_stay_are_passed_over() -> None:
    stays, goes, first = job(0, 300), job(1, 200), job(2, 50)
    view = short(stays, goes, first)

    def holding(one: Job) -> Holding | None:
        return None if one is stays else view.holding(one)

    assert yielding(replace(view, holding=holding)) == [goes]


def test_what_host_memory_has_no_room_for_is_computed_again() -> None:
    # Even if only swaps are allowed: the engine would compute it again.
    first, *others = job(0, 10), job(1, 20), job(2, 21)
    view = short(first, *others, host_free_tokens=30)
    roomless = short(first, *others, host_free_tokens=0)
    assert [each.mode for each in decided(roomless).actions] == [
        PreemptionMode.RECOMPUTE,
        PreemptionMode.RECOMPUTE,
    ]
    # Unless what was counted in its answer would be lost.
    whole = replace(view, holding=lambda one: Holding(one.input_tokens, 0, one.input_tokens, True))
    assert [(each.job, each.mode) for each in decided(whole).actions] == [
        (others[1], PreemptionMode.SWAP)
    ]
    # What one takes of host memory the next does not find there.
    for_one = short(first, job(1, 6), job(2, 7), host_free_tokens=10)
    assert [each.mode for each in decided(for_one).actions] == [
        PreemptionMode.SWAP,
        PreemptionMode.RECOMPUTE,
    ]


def test_nobody_yields_if_nobody_may() -> None:
    view = short(job(0, 50), job(1, 300))
    assert decided(replace(view, can_swap=False, may_preempt=False)).actions == ()
    assert decided(replace(view, may_preempt=False)).actions == ()


def test_it_is_asked_in_a_full_batch_in_which_nothing_else_has_happened() -> None:
    view = short(job(0, 50), job(1, 300, num_preemptions=100))
    full = replace(view, batch_is_full=True, num_arrivals_planned=view.num_arrivals)
    assert len(yielding(full)) == 1
    assert len(yielding(replace(full, waiting=()))) == 1
    assert decided(replace(full, step_tokens=0)) == Plan(order=None)
