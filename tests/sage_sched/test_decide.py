"""What a pass decides, with toy policies: neither executor knows of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sage_sched.job import Hints, Job
from sage_sched.plan import Admit, Budget, Plan, Preempt, PreemptionMode, Resume
from sage_sched.policy import NoParameters, Policy
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import SERVER, decide, waiting


class ByInput(Policy):
    """The shortest prompt first; it pushes out any that is longer."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return float(job.input_tokens)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return waiting.input_tokens < running.input_tokens


def job(arrival: int, input_tokens: int = 10, cap: int = 10, **about: object) -> Job:
    return Job(arrival, input_tokens, cap, None, 0, **about)  # type: ignore[arg-type]


def decided(view: SchedulerView, policy: type[Policy] = ByInput) -> Plan:
    return decide(view, policy(NoParameters(), SERVER))


def full(view: SchedulerView, *running: Job) -> SchedulerView:
    """No room beside these that run, each of which may leave."""
    return replace(
        view,
        running=running,
        batch_is_full=True,
        free_slots=0,
        free_tokens=0,
        holding=lambda job: Holding(job.input_tokens, 0, job.input_tokens, True),
    )


def test_while_there_is_room_all_may_enter_in_their_order() -> None:
    long, short = job(0, 50), job(1, 5)
    plan = decided(waiting(long, short))
    assert plan.order == [1, 0]
    assert plan.actions == (Admit(short, "no other job runs"), Admit(long, "no other job runs"))
    assert plan.num_open == 0


def test_nobody_gets_into_a_full_batch_but_those_to_whom_others_yield() -> None:
    running, newcomer, behind = job(0, 500, 50), job(1, 20), job(2, 30, 1000)
    plan = decided(full(waiting(newcomer, behind), running))
    yields, enters = plan.actions
    assert isinstance(yields, Preempt)
    assert (yields.job, yields.to, yields.mode) == (running, newcomer, PreemptionMode.SWAP)
    assert enters == Admit(newcomer, "others are preempted for it")
    assert plan.num_open == 0


def test_nobody_yields_for_kv_that_others_hold_already() -> None:
    running = [job(0, 500, 50), job(1, 500, 50)]
    newcomer = job(2, 400, 50)
    view = replace(full(waiting(newcomer), *running), batch_is_full=False, free_slots=1)
    view = replace(view, free_tokens=300)
    assert any(isinstance(each, Preempt) for each in decided(view).actions)
    shares = replace(view, shared_tokens=lambda place: 380)
    assert not any(isinstance(each, Preempt) for each in decided(shares).actions)
    # Each job is asked of by where it waits, not by its place in the order.
    longer = replace(view, waiting=[job(3, 450, 50), newcomer], num_arrivals=4)
    for sharing, yields in ((1, False), (0, True)):
        shared = [0, 0]
        shared[sharing] = 380
        plan = decided(replace(longer, shared_tokens=shared.__getitem__))
        taken = [each.to for each in plan.actions if isinstance(each, Preempt)]
        assert yields is (newcomer in taken)


def test_nobody_yields_to_one_whose_adapter_finds_no_room() -> None:
    running, other, behind = job(0, 500, 50), job(1, 20), job(2, 30)
    view = replace(full(waiting(other, behind), running), has_adapter=lambda place: place == 1)
    plan = decided(view)
    assert plan.order == [1]
    assert [each.job for each in plan.actions if isinstance(each, Admit)] == [behind]


def test_nobody_passes_a_promised_one_that_waits_for_its_adapter() -> None:
    other, behind = job(1, 20), job(2, 30)
    other.pass_starvation_bound()
    view = replace(waiting(other, behind), running=[job(0)], has_adapter=lambda place: place == 1)
    plan = decided(view)
    assert not plan.actions
    assert plan.num_open == 0


def test_nor_one_whose_adapter_has_room_until_another_enters() -> None:
    first, promised, behind = job(0), job(1), job(2)
    for one in (first, promised):
        one.pass_starvation_bound()
    view = replace(waiting(first, promised, behind), adapters_in_order=lambda: (0, 2).__contains__)
    plan = decided(view)
    assert [each.job for each in plan.actions] == [first]
    assert plan.num_open == 0


def test_nobody_yields_for_the_sake_of_those_without_room_for_their_adapters() -> None:
    seen: list[list[Job]] = []

    class Noting(ByInput):
        def should_preempt(
            self, running: Job, waiting: Job, price_s: float, view: SchedulerView
        ) -> bool:
            seen.append([*view.waiting])
            return False

    queue = [job(arrival, 10 + arrival) for arrival in range(4)]
    fitting = [queue[1], queue[3]]
    for these in (queue, queue[::-1]):  # ranks may have them in different orders
        view = full(waiting(*these), job(9, 500, 50))
        decided(replace(view, has_adapter=lambda at, these=these: these[at] in fitting), Noting)
    assert all(each == fitting for each in seen)
    assert len(seen) >= 2


def test_a_full_batch_is_left_alone_until_there_is_news() -> None:
    running, newcomer = job(0, 500, 50, generated_tokens=7), job(1, 20)
    view = full(waiting(newcomer), running)
    assert decided(view).actions
    planned = replace(view, num_arrivals_planned=view.num_arrivals)
    assert decided(planned) == Plan(order=None)
    running.grow(ByInput.refresh_interval_tokens)
    assert decided(planned).actions
    # A step with drafts may pass over the boundary by as many tokens as it sets memory aside for.
    running.grow(ByInput.refresh_interval_tokens + 3)
    assert decided(planned) == Plan(order=None)
    drafts = replace(planned, server=replace(SERVER, reserve_tokens=4))
    assert decided(drafts).actions
    assert decided(replace(view, can_swap=False, may_preempt=False)) == Plan(order=None)


def test_the_kv_of_one_that_yields_goes_to_host_memory_or_it_stays() -> None:
    running, newcomer = job(0, 500, 50), job(1, 20)
    view = full(waiting(newcomer), running)

    def way(
        token_s: float, stays_whole: bool, host_free_tokens: int = 10_000
    ) -> PreemptionMode | None:
        plan = decided(
            replace(
                view,
                server=replace(SERVER, swap_token_s=token_s),
                host_free_tokens=host_free_tokens,
                holding=lambda job: Holding(500, 400, 500, stays_whole),
            )
        )
        assert plan.num_without_host_room == (0 if plan.actions else 1)
        return next((each.mode for each in plan.actions if isinstance(each, Preempt)), None)

    # To compute it again may be cheaper, but rounds differently.
    for token_s in (1e-6, 1.0):
        for stays_whole in (False, True):
            assert way(token_s, stays_whole) is PreemptionMode.SWAP
            assert way(token_s, stays_whole, host_free_tokens=499) is None


def test_victims_share_what_host_memory_has_room_for() -> None:
    running = [job(0, 500, 50), job(1, 500, 50)]
    view = full(waiting(job(2, 20), job(3, 20)), *running)
    both = decided(replace(view, host_free_tokens=1000))
    assert sum(isinstance(each, Preempt) for each in both.actions) == 2
    one = decided(replace(view, host_free_tokens=999))
    assert sum(isinstance(each, Preempt) for each in one.actions) == 1
    assert one.num_without_host_room == 1


def test_a_swapped_job_resumes_and_nobody_overtakes_it() -> None:
    back, fresh = job(0, 10, 20, generated_tokens=5), job(1, 30)
    view = replace(waiting(back, fresh), swapped={back}, running=[job(2)])
    plan = decided(view)
    assert plan.actions[0] == Resume(back, "there is room for it")
    assert plan.swapped_go_first


def test_a_swapped_job_comes_back_if_nobody_runs_without_headroom() -> None:
    back = job(0, 10, 4000, generated_tokens=5)
    view = replace(waiting(back), swapped={back}, free_tokens=20)
    assert decided(view).actions == (Resume(back, "no other job runs"),)
    assert decided(replace(view, running=[job(1)])).actions == ()


def test_if_preemption_is_switched_off_nobody_yields_and_those_that_have_come_back() -> None:
    running, newcomer, swapped = job(0, 500, 50), job(1, 20), job(2, 20, 1000)
    view = waiting(newcomer)
    assert decided(replace(full(view, running), may_preempt=False)).actions == ()
    # One that the new policy cannot rank too, which others stay behind.
    for is_ranked in (True, False):
        swapped.is_ranked = is_ranked
        in_host_memory = replace(waiting(swapped), swapped={swapped}, may_preempt=False)
        plan = decided(replace(in_host_memory, running=[job(3)]))
        assert plan.actions == (Resume(swapped, "there is room for it"),)


def test_nobody_yields_to_a_session_which_keeps_its_memory() -> None:
    running, newcomer = job(0, 500, 50), job(1, 20, keeps_memory=True)
    assert decided(full(waiting(newcomer), running)).actions == ()


class HoldsUrgencyFive(ByInput):
    """Jobs of urgency 5 wait until nobody else does or runs."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return math.inf if job.hints.urgency == 5 else super().key(job, view)


def test_a_class_may_be_held_back_but_not_for_ever() -> None:
    held, other = job(0, 1, hints=Hints(urgency=5)), job(1, 50)
    plan = decided(waiting(held, other), HoldsUrgencyFive)
    assert plan.order == [1, 0]
    assert [each.job for each in plan.actions] == [other]
    assert plan.num_open == 0
    beside = replace(waiting(held), running=[other])
    assert decided(beside, HoldsUrgencyFive).num_open == 0
    assert decided(beside, HoldsUrgencyFive).actions == ()
    assert [each.job for each in decided(waiting(held), HoldsUrgencyFive).actions] == [held]


class FirstTokenByDeadline(ByInput):
    """Earliest deadline first; a pass prefills no more than the nearest deadline allows, and
    nothing while one that runs is late."""

    uses_clock = True

    def key(self, job: Job, view: SchedulerView) -> float:
        return job.arrival_s + (job.hints.ttft_slo_ms or math.inf) / 1e3

    def budget(self, view: SchedulerView) -> Budget | None:
        slack_s = min(self.key(job, view) - view.now_s for job in (*view.waiting, *view.running))
        prefill_tokens = int(max(0.0, slack_s) * 1000)
        return Budget(prefill_tokens, chunk_tokens=max(1, prefill_tokens // 2))


def test_a_deadline_sets_the_budget_and_decode_only() -> None:
    soon, later = (
        job(number, arrival_s=1.0, hints=Hints(ttft_slo_ms=slo_ms))
        for number, slo_ms in ((1, 500.0), (0, 2000.0))
    )
    view = replace(waiting(later, soon), now_s=1.25)
    plan = decided(view, FirstTokenByDeadline)
    assert plan.order == [1, 0]
    assert plan.budget == Budget(250, 125)
    late = replace(view, now_s=2.0, running=[job(2, arrival_s=0.0, hints=Hints(ttft_slo_ms=1.0))])
    assert decided(late, FirstTokenByDeadline).decode_only
    # With nobody to decode, decoding alone would be standing still.
    assert not decided(replace(view, now_s=9.0), FirstTokenByDeadline).decode_only


def test_without_preemption_all_in_the_queue_may_enter_as_far_as_memory_goes() -> None:
    view = replace(waiting(job(0), job(1)), can_swap=False, may_preempt=False)
    plan = decided(view)
    assert (plan.order, plan.num_open, plan.actions) == ([0, 1], 2, ())


@pytest.mark.parametrize("tokens", [-1, 2.5, math.nan, True, "5"])
def test_a_budget_is_of_whole_tokens(tokens: object) -> None:
    with pytest.raises(ValueError, match="prefill_tokens"):
        Budget(prefill_tokens=tokens)  # type: ignore[arg-type]


class NoNumber(ByInput):
    """A bug."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return math.nan


def test_a_key_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a number"):
        decided(waiting(job(0)), NoNumber)
