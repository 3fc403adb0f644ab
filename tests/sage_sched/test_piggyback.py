"""Who gets in beside the next chunk of a long prompt, with a toy policy."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sage_sched.plan import Admit, Budget, Plan, Preempt, Resume
from sage_sched.policy import NoParameters
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import SERVER, decide, waiting
from tests.sage_sched.test_decide import ByInput, decided, full, job

LONG = job(0, 3000, prefilled_tokens=512)


def beside(view: SchedulerView, **about: object) -> SchedulerView:
    """A long prompt is being chunked, and one request runs."""
    return replace(view, chunked=LONG, running=[job(1, 50)], **about)  # type: ignore[arg-type]


def test_those_that_go_first_share_the_next_chunk() -> None:
    short, middling = job(2, 20), job(3, 100)
    plan = decided(beside(waiting(middling, short)))
    assert plan.actions == (
        Admit(short, "there is room for it"),
        Admit(middling, "there is room for it"),
    )
    assert plan.budget == Budget(chunk_tokens=512 - 120)


def test_without_preemption_they_do_too() -> None:
    short, behind = job(2, 20), job(3, 4000)
    plan = decided(beside(waiting(behind, short), can_swap=False, may_preempt=False))
    assert (plan.order, plan.actions, plan.num_open) == ([1, 0], (), 2)
    assert plan.budget.chunk_tokens == 512 - 20


def test_the_chunked_prompt_keeps_a_page() -> None:
    view = beside(waiting(job(2, 511)), page_size=16)
    assert decided(view).budget.chunk_tokens is None
    view = beside(waiting(job(2, 481)), page_size=16)
    assert decided(view).budget.chunk_tokens == 16


def test_one_too_long_for_any_chunk_is_passed_over_and_counted() -> None:
    too_long, longer, short = job(2, 600), job(3, 4000), job(4, 700, generated_tokens=5)
    plan = decided(beside(waiting(too_long, longer, short), swapped={short}))
    assert plan.actions == (Resume(short, "there is room for it"),)
    assert plan.order == [2, 0, 1]
    assert plan.num_too_long == 1
    assert plan.budget.chunk_tokens is None


def test_one_that_fits_behind_one_that_does_not_gets_in() -> None:
    plan = decided(beside(waiting(job(2, 400), job(3, 300), job(4, 100), job(5, 600))))
    assert [each.job.arrival for each in plan.actions] == [4, 3]
    assert plan.num_too_long == 1  # of 400 tokens is not: the next chunk may have room for it


def test_nobody_of_a_worse_key_gets_a_part() -> None:
    plan = decided(beside(waiting(job(2, 4000))))
    assert (plan.actions, plan.num_open) == ((), 1)
    assert plan.budget.chunk_tokens is None


def test_a_chunked_prompt_that_cannot_be_ranked_goes_by_arrival() -> None:
    view = replace(beside(waiting(job(2, 20))), chunked=replace(LONG, is_ranked=False))
    assert decided(view).budget.chunk_tokens is None
    earlier = replace(view, waiting=[job(-1, 20)])
    assert decided(earlier).budget.chunk_tokens == 512 - 20


def test_those_to_whom_nobody_may_yield_wait_and_are_passed_over() -> None:
    unranked, session = job(-1, 20, is_ranked=False), job(2, 5, keeps_memory=True)
    short = job(3, 30)
    plan = decided(beside(waiting(unranked, session, short)))
    assert [each.job for each in plan.actions] == [short]
    assert plan.budget.chunk_tokens == 512 - 30


def test_the_rest_of_the_long_prompt_has_memory_set_aside() -> None:
    """Or those that got in would hold what it needs to end, and nobody could give any back."""
    short = job(5, 20, 10)
    needed = 3000 + 10 + 1 - 512 + 20 + 10 + 1  # prompts, answers and a page each
    aside = 10  # the cap of the one that runs
    for free_tokens, enters in ((needed + aside + 1, True), (needed + aside, False)):
        plan = decided(beside(waiting(short), free_tokens=free_tokens))
        assert bool(plan.actions) == enters == (plan.budget.chunk_tokens is not None)


def test_the_long_prompt_has_a_slot() -> None:
    assert not decided(beside(waiting(job(2, 20)), free_slots=1)).actions
    assert decided(beside(waiting(job(2, 20)), free_slots=2)).actions


def test_running_ones_yield_to_those_beside_a_chunk_alone() -> None:
    running, short, too_long = job(1, 5000, 50), job(2, 20), job(3, 600)
    view = replace(full(waiting(short, too_long), running), chunked=LONG)
    view = replace(view, free_tokens=9000, holding=lambda job: Holding(5000, 0, 5000, True))
    plan = decided(replace(view, free_slots=1))
    assert [type(each) for each in plan.actions] == [Preempt, Admit]
    assert plan.budget.chunk_tokens == 512 - 20
    assert not decided(replace(view, waiting=[too_long])).actions


def test_a_policys_budget_is_shared_too() -> None:
    class Frugal(ByInput):
        def budget(self, view: SchedulerView) -> Budget:
            return Budget(prefill_tokens=100, chunk_tokens=90)

    plan = decided(beside(waiting(job(2, 20), job(3, 200))), Frugal)
    assert plan.budget == Budget(prefill_tokens=100, chunk_tokens=80)
    assert [each.job.arrival for each in plan.actions] == [2]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=30), st.sampled_from([1, 16]))
def test_guests_and_the_chunk_never_take_more_than_a_pass(lengths: list[int], page: int) -> None:
    jobs = [job(2 + i, length) for i, length in enumerate(lengths)]
    view = beside(waiting(*jobs), page_size=page)
    plan: Plan = decide(view, ByInput(NoParameters(), SERVER))
    taken = sum(-(-each.job.input_tokens // page) * page for each in plan.actions)
    chunk_tokens = plan.budget.chunk_tokens
    if chunk_tokens is None:
        assert taken == 0
    else:
        assert chunk_tokens >= page
        assert taken + chunk_tokens <= view.pass_tokens
    assert plan.order is not None
    assert sorted(plan.order) == list(range(len(jobs)))
    entering = [view.waiting[position] for position in plan.order[: len(plan.actions)]]
    assert [each.job for each in plan.actions] == entering


def test_nobody_gets_in_beside_a_chunk_past_one_that_is_promised_its_turn() -> None:
    too_long, short = job(2, 600), job(3, 20)
    assert decided(beside(waiting(too_long, short))).budget.chunk_tokens == 512 - 20
    too_long.pass_starvation_bound()
    plan = decided(beside(waiting(too_long, short)))
    assert plan.actions == ()
    assert plan.order == [0, 1]
    unranked = job(-1, 20, is_ranked=False)
    unranked.pass_starvation_bound()
    assert decided(beside(waiting(unranked, short))).actions == ()


def test_a_promised_chunk_has_its_turn() -> None:
    promised = replace(LONG)
    promised.pass_starvation_bound()
    short = job(2, 20)
    view = replace(beside(waiting(short)), chunked=promised)
    assert decided(view).actions == ()
    short.pass_starvation_bound()
    assert decided(view).actions == ()  # it came later
