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
from sage_sched.plan import Budget, Plan, PreemptionMode
from sage_sched.policy import NoParameters, Policy
from sage_sched.preemption import Admission, plan_admissions
from sage_sched.preemption_cost import PreemptionCost
from sage_sched.view import SchedulerView
from tests.sage_sched.situations import ByInput, decided, view_of
from tests.sage_sched.strategies import IDLE, SERVER, decide, job, waiting


def plan_of(view: SchedulerView, policy: type[Policy] = ByInput) -> Plan:
    return decide(view, policy(NoParameters(), view.server))


class HoldsLeastUrgent(ByInput):
    """Jobs of urgency 5 wait until no other waits or runs."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return math.inf if job.hints.urgency == 5 else super().key(job, view)


class Frugal(ByInput):
    """A policy with a budget."""

    def budget(self, view: SchedulerView) -> Budget:
        return Budget(prefill_tokens=100, chunk_tokens=90)


class Stingy(ByInput):
    """A job is preempted only if its move takes less than 11 ms: the KV of 550 tokens."""

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return super().should_preempt(running, waiting, price_s, view) and price_s < 0.011


@pytest.mark.parametrize(
    ("policy", "situation", "plan"),
    [
        (HoldsLeastUrgent, "wait 0:1u5 1:50", "+1 0"),
        (HoldsLeastUrgent, "run 1:50; wait 0:1u5", "0"),
        (HoldsLeastUrgent, "wait 0:1u5", "+0"),
        # Piggybacked prefills share a policy's budget with the chunk.
        (Frugal, "chunk 0:3000/512; run 1:50; wait 2:20 3:200",
         "+2 3; open 1; chunk 80; prefill 100; too-long 1"),
        (Stingy, "run 0:2000 1:500; wait 2:20; full", "-1 +2"),
        (Stingy, "run 0:2000; wait 2:20; full", "2"),
    ],
)  # fmt: skip
def test_a_policy_holds_back_limits_and_weighs(
    policy: type[Policy], situation: str, plan: str
) -> None:
    assert decided(situation, policy) == plan


def test_nobody_yields_for_the_sake_of_those_without_room_for_their_adapters() -> None:
    seen: list[list[int]] = []

    class Noting(ByInput):
        def should_preempt(
            self, running: Job, waiting: Job, price_s: float, view: SchedulerView
        ) -> bool:
            seen.append([one.arrival for one in view.waiting])
            return False

    for queue in ("0:10 1:11 2:12 3:13", "3:13 2:12 1:11 0:10"):  # the order differs between ranks
        plan_of(view_of(f"run 9:500<50; wait {queue}; full; fits 1 3"), Noting)
    assert len(seen) >= 2
    assert all(each == [1, 3] for each in seen)


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
    soon, later, late = (
        job(arrival, arrival_s=arrival_s, hints=Hints(ttft_slo_ms=slo_ms))
        for arrival, arrival_s, slo_ms in ((1, 1.0, 500.0), (0, 1.0, 2000.0), (2, 0.0, 1.0))
    )
    view = replace(waiting(later, soon), now_s=1.25)
    plan = plan_of(view, FirstTokenByDeadline)
    assert (plan.order, plan.budget) == ([1, 0], Budget(250, 125))
    assert plan_of(replace(view, now_s=2.0, running=[late]), FirstTokenByDeadline).decode_only
    # Without running jobs, decoding alone would be idling.
    assert not plan_of(replace(view, now_s=9.0), FirstTokenByDeadline).decode_only


@given(st.lists(st.integers(1, 700), min_size=1, max_size=30), st.sampled_from([1, 16]))
def test_piggybacked_prefills_fit_the_pass(lengths: list[int], page: int) -> None:
    jobs = [job(2 + i, length) for i, length in enumerate(lengths)]
    view = view_of(f"chunk 0:3000/512; run 1:50; page {page}")
    view = replace(view, waiting=jobs, num_arrivals=len(jobs) + 2)
    plan = plan_of(view)
    taken = sum(-(-each.job.input_tokens // page) * page for each in plan.actions)
    chunk_tokens = plan.budget.chunk_tokens
    if chunk_tokens is None:
        assert taken == 0
    else:
        assert chunk_tokens >= page
        assert taken + chunk_tokens <= view.pass_tokens
    assert sorted(plan.order or ()) == list(range(len(jobs)))


def test_as_many_leave_as_the_headroom_of_the_others_takes() -> None:
    running = " ".join(f"{number}:{10 + number}<4000+5" for number in range(10))
    view = view_of(f"run {running}; short; move 0")
    gone = [action.job for action in plan_of(view).actions]
    assert gone == list(view.running)[: -len(gone) - 1 : -1]
    # Each frees its own tokens, and the others need 8 tokens each.
    num_left = len(view.running) - len(gone)
    assert sum(one.input_tokens for one in gone) >= 8 * num_left
    assert sum(one.input_tokens for one in gone[:-1]) < 8 * (num_left + 1)


def test_no_prompt_waits_for_a_prefix_that_is_cached_or_that_waits_itself() -> None:
    view = view_of("wait 0:2000 1:2100 2:2200; prefix 1900 0 1; pass 8000")
    cached = plan_of(replace(view, cached_tokens=lambda position: 1900))
    assert [each.job.arrival for each in cached.actions] == [0, 1, 2]
    # Two documents in one: the third shares with the second what that does not compute now.
    pairs: dict[tuple[int, int | Job], int] = {(1, 0): 1000, (2, 1): 1000}
    shared = replace(view, common_tokens=lambda position, other: pairs.get((position, other), 0))
    plan = plan_of(shared)
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
        plan_of(waiting(job(0)), NoNumber)
