"""Decisions of a pass, with toy policies."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.job import Hints, Job
from sage_sched.plan import Budget, Plan, Preempt, PreemptionMode
from sage_sched.policy import NoParameters, Policy
from sage_sched.preemption import Admission, plan_admissions
from sage_sched.preemption_cost import PreemptionCost
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.situations import ByInput, view_of
from tests.sage_sched.strategies import IDLE, SERVER, decide, full, job, waiting


def decided(view: SchedulerView, policy: type[Policy] = ByInput) -> Plan:
    return decide(view, policy(NoParameters(), SERVER))


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


class HoldsUrgencyFive(ByInput):
    """Jobs of urgency 5 wait until no other waits or runs."""

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
    """Earliest deadline first. A pass prefills no more than the nearest deadline allows, and
    nothing while a running job is late."""

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
    # Without running jobs, decoding alone would be idling.
    assert not decided(replace(view, now_s=9.0), FirstTokenByDeadline).decode_only


@pytest.mark.parametrize("tokens", [-1, 2.5, math.nan, True, "5"])
def test_a_budget_is_of_whole_tokens(tokens: object) -> None:
    with pytest.raises(ValueError, match="prefill_tokens"):
        Budget(prefill_tokens=tokens)  # type: ignore[arg-type]


class Frugal(ByInput):
    """A policy with a budget."""

    def budget(self, view: SchedulerView) -> Budget:
        return Budget(prefill_tokens=100, chunk_tokens=90)


def test_piggybacked_prefills_share_a_policys_budget_with_the_chunk() -> None:
    view = view_of("chunk 0:3000/512; run 1:50; wait 2:20 3:200")
    plan = decided(view, Frugal)
    assert plan.budget == Budget(prefill_tokens=100, chunk_tokens=80)
    assert [each.job.arrival for each in plan.actions] == [2]


class Stingy(ByInput):
    """A job is preempted only if its move takes less than 11 ms: the KV of 550 tokens."""

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return super().should_preempt(running, waiting, price_s, view) and price_s < 0.011


def test_a_job_whose_move_costs_too_much_stays() -> None:
    plan = decided(view_of("run 0:2000 1:500; wait 2:20; full"), Stingy)
    assert [each.job.arrival for each in plan.actions] == [1, 2]
    assert decided(view_of("run 0:2000; wait 2:20; full"), Stingy).actions == ()


@given(st.lists(st.integers(1, 700), min_size=1, max_size=30), st.sampled_from([1, 16]))
def test_piggybacked_prefills_fit_the_pass(lengths: list[int], page: int) -> None:
    jobs = [job(2 + i, length) for i, length in enumerate(lengths)]
    view = replace(view_of("chunk 0:3000/512; run 1:50"), page_size=page)
    view = replace(view, waiting=jobs, num_arrivals=len(jobs) + 2)
    plan = decided(view)
    taken = sum(-(-each.job.input_tokens // page) * page for each in plan.actions)
    chunk_tokens = plan.budget.chunk_tokens
    if chunk_tokens is None:
        assert taken == 0
    else:
        assert chunk_tokens >= page
        assert taken + chunk_tokens <= view.pass_tokens
    assert plan.order is not None
    assert sorted(plan.order) == list(range(len(jobs)))


def test_as_many_leave_as_the_headroom_of_the_others_takes() -> None:
    free = replace(SERVER, swap_token_s=0.0)
    running = " ".join(f"{number}:{10 + number}<4000+5" for number in range(10))
    view = replace(view_of(f"run {running}; short"), server=free)
    gone = [action.job for action in decide(view, ByInput(NoParameters(), free)).actions]
    assert gone == list(view.running)[: -len(gone) - 1 : -1]
    # Each frees its own tokens, and the others need 8 tokens each.
    num_left = len(view.running) - len(gone)
    assert sum(one.input_tokens for one in gone) >= 8 * num_left
    assert sum(one.input_tokens for one in gone[:-1]) < 8 * (num_left + 1)


def test_no_prompt_waits_for_a_prefix_that_is_cached_or_that_waits_itself() -> None:
    view = view_of("wait 0:2000 1:2100 2:2200; prefix 1900 0 1; pass 8000")
    cached = decided(replace(view, cached_tokens=lambda position: 1900))
    assert [each.job.arrival for each in cached.actions] == [0, 1, 2]
    # Two documents in one: the third shares with the second what that does not compute now.
    pairs: dict[tuple[int, int | Job], int] = {(1, 0): 1000, (2, 1): 1000}
    plan = decided(
        replace(view, common_tokens=lambda position, other: pairs.get((position, other), 0))
    )
    assert [each.job.arrival for each in plan.actions] == [0, 2]
    assert not plan.is_new  # so that the next pass plans again


@given(st.integers(0, 10**9))
def test_ranks_admit_alike_and_no_job_is_preempted_in_vain(seed: int) -> None:
    script, policy, most = random.Random(seed), ByInput(NoParameters(), SERVER), 3
    running = [
        job(number, script.randrange(6), num_preemptions=script.randint(0, most))
        for number in range(script.randint(0, 5))
    ]
    freed = {each: script.randint(0, 200) for each in running}
    queue = [job(10 + number, script.randrange(6)) for number in range(script.randint(1, 6))]
    candidates = [(each, script.randint(1, 250)) for each in queue]
    free_slots, free_tokens = script.randint(0, 2), script.randint(0, 300)

    def planned(batch: Sequence[Job]) -> list[Admission]:
        return plan_admissions(
            batch, candidates, free_slots=free_slots, free_tokens=free_tokens, policy=policy,
            prefill_tokens=IDLE.pass_tokens, view=IDLE, max_preemptions=most,
            cost_of=lambda each: PreemptionCost(PreemptionMode.SWAP, 0.0, freed[each]),
        )  # fmt: skip

    # The order in which a batch holds its requests differs between ranks.
    admissions = planned(running)
    assert admissions == planned(script.sample(running, len(running)))
    assert [each.newcomer for each in admissions] == queue[: len(admissions)]
    for (newcomer, victims), (_, needed_tokens) in zip(admissions, candidates, strict=False):
        gained_tokens = sum(freed[victim.job] for victim in victims)
        for victim in victims:
            assert victim.job.num_preemptions < most
            assert policy.should_preempt(victim.job, newcomer, 0.0, IDLE)
            has_slot = free_slots + len(victims) - 1 > 0
            has_room = free_tokens + gained_tokens - freed[victim.job] > needed_tokens
            assert not (has_slot and has_room)
        free_slots += len(victims) - 1
        free_tokens += gained_tokens - needed_tokens
        assert free_slots >= 0
        assert free_tokens > 0


def test_a_key_that_is_not_a_number_is_an_error() -> None:
    class NoNumber(ByInput):
        def key(self, job: Job, view: SchedulerView) -> float:
            return math.nan

    with pytest.raises(ValueError, match="not a number"):
        decided(waiting(job(0)), NoNumber)
