"""Decisions of a pass, with toy policies."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.adapters import Adapters
from sage_sched.admission import Admission, plan_admissions
from sage_sched.job import Job
from sage_sched.plan import Budget, Plan
from sage_sched.policy import NoParameters, Policy
from sage_sched.preemption import Preemptible
from sage_sched.view import Holding, SchedulerView
from sage_sched.waiting_queue import WaitingQueue
from tests.sage_sched.situations import ByInput, HoldsLeastUrgent, Story, decided, view_of
from tests.sage_sched.strategies import IDLE, SERVER, StandInKv, decide, job, waiting


def plan_of(view: SchedulerView, policy: type[Policy] = ByInput) -> Plan:
    return decide(view, policy(NoParameters(), view.server))


class Frugal(ByInput):
    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget:
        return Budget(prefill_tokens=100, chunk_tokens=90)


class OnlyDecodes(ByInput):
    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget:
        return Budget(prefill_tokens=0)


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
        (HoldsLeastUrgent, "chunk 1:50/9; wait 0:1u5", "0"),
        (HoldsLeastUrgent, "run 2:20; wait 0:1@-1u5 1:10@1", "+1 0"),  # behind all levels
        # Piggybacked prefills share a policy's budget with the chunk.
        (Frugal, "chunk 0:3000/512; run 1:50; wait 2:20 3:200",
         "+2 3; open 1; chunk 80; prefill 100; too-long 1"),
        (OnlyDecodes, "run 1:50; wait 0:5", "0; decode-only"),
        (OnlyDecodes, "wait 0:5", "+0"),  # decoding alone would be idling
        (Stingy, "run 0:2000 1:500; wait 2:20; full", "-1 +2"),
        (Stingy, "run 0:2000; wait 2:20; full", "2"),
    ],
)  # fmt: skip
def test_a_policy_holds_back_limits_and_weighs(
    policy: type[Policy], situation: str, plan: str
) -> None:
    assert decided(situation, policy) == plan


def test_no_job_yields_to_jobs_without_room_for_their_adapters() -> None:
    seen: list[list[int]] = []

    class Noting(ByInput):
        def should_preempt(
            self, running: Job, waiting: Job, price_s: float, view: SchedulerView
        ) -> bool:
            seen.append([one.arrival for one in view.waiting])
            return False

    for queue in ("0:10 1:11 2:12 3:13", "3:13 2:12 1:11 0:10"):  # the order differs between ranks
        assert decided(f"run 9:500<50; wait {queue}; full; fits 1 3", Noting) == "1 3"
    assert len(seen) >= 2
    assert all(each == [1, 3] for each in seen)


def test_a_turn_of_an_adapter_ends_once_all_have_slots() -> None:
    one, two, cold = (job(number, adapter=name, age=5) for number, name in enumerate("abc"))
    adapters, now_s = Adapters(), 0.0

    def look(running: list[Job], left: Job | None, joined: Job | None) -> tuple[list[Job], bool]:
        """Return the jobs to swap out, and whether `one` may run after that."""
        nonlocal now_s
        now_s += 0.3
        if left is not None:
            adapters.dequeued([left])
        if joined is not None:
            adapters.queued([joined])
        view = replace(
            IDLE, now_s=now_s, running=running, kv=StandInKv(
                fits_adapters=lambda names: len(names) <= 2,
                holding=lambda job: Holding(job.input_tokens + job.generated_tokens, 0, 10, True),
            ),
        )  # fmt: skip
        moved = [preempt.job for preempt, _ in adapters.moves(view)]
        return moved, adapters.has_slot(view)(one)

    assert look([one, two], None, cold) == ([], True)
    while not (found := look([one, two], None, None))[0]:
        assert now_s < 5.0
    assert found == ([one], False)
    assert look([two], None, one) == ([], False)
    assert look([two, cold], cold, None) == ([], False)
    assert look([cold], None, None) == ([], True)


def test_a_prompt_waits_for_a_prefix_only_if_the_other_computes_it_now() -> None:
    # Two documents in one: the third shares with the second a part that it does not compute now.
    pairs = {(1, 0): 1000, (2, 1): 1000}
    view = replace(
        view_of("wait 0:2000 1:2100 2:2200; pass 8000"),
        kv=StandInKv(common_tokens=lambda *two: pairs.get((two[0].arrival, two[1].arrival), 0)),
    )
    plan = plan_of(view)
    assert [each.job.arrival for each in plan.actions] == [0, 2]
    assert not plan.is_new  # so that the next pass plans again


def test_a_long_queue_waits_for_a_prefix_that_another_job_computes() -> None:
    """The first jobs of the order are compared with each other, the others with the first one."""
    jobs = " ".join(f"{number}:2000" for number in range(40))
    view = replace(
        view_of(f"wait {jobs}; pass 80000"),
        kv=StandInKv(common_tokens=lambda *two: 0 if 30 in (each.arrival for each in two) else 999),
    )
    assert [each.job.arrival for each in plan_of(view).actions] == [0, 30]


@pytest.mark.parametrize(
    ("name", "due"),
    [("sage", ""), ("uniboost", ""), ("fastserve", ""), ("proserve-expected", "d9000p90")],
)
def test_the_longer_prompt_goes_first_if_most_of_it_is_cached(name: str, due: str) -> None:
    story = Story(name)
    for cached_tokens, order in ((0, "0 1"), (3490, "1 0"), (0, "0 1")):
        queue = f"wait 0:3000%30,40{due} 1:3500%30,40{due}; cached 1 {cached_tokens}"
        plans = [story.plan(f"{queue}; full") for _ in range(2)]
        assert plans[-1] == order


def test_tokens_cached_in_host_memory_cost_their_way_back() -> None:
    story, keys = Story("sage"), []
    for share in (0.0, 0.5, 2.0):
        server = replace(SERVER, swap_token_s=share * SERVER.step_time.prefill_token_s)
        story.plan("wait 0:3500%30,40", kv={"cached": lambda job: (3400, 3000)}, server=server)
        keys.append(story.core.policy.key(story.jobs[0], IDLE))
        assert story.jobs[0].cached_input_tokens == 3400 - min(share, 1.0) * 3000
    assert keys == sorted(set(keys))


def test_new_jobs_and_the_first_to_serve_are_looked_up() -> None:
    """Swapped jobs and streaming sessions are not, because they would lend their KV to others."""
    story, asked = Story(), list[int]()
    others = " ".join(f"{arrival}:{10 + arrival}" for arrival in range(40))
    for expected in ([*range(40)], [*range(8)]):
        asked.clear()
        queue = f"wait {others} 40:99~+5 41:99k; full"
        story.plan(queue, kv={"cached": lambda job: asked.append(job.arrival) or (0, 0)})
        assert sorted(set(asked)) == expected


@given(st.integers(0, 10**9))
def test_ranks_admit_alike_and_no_job_is_preempted_in_vain(seed: int) -> None:
    script, policy = random.Random(seed), ByInput(NoParameters(), SERVER)
    most = policy.traits.max_preemptions
    running = [
        job(number, script.randrange(6), num_preemptions=script.randint(0, most))
        for number in range(script.randint(0, 5))
    ]
    freed = {each: script.randint(0, 200) for each in running}
    queue = [job(10 + number, script.randrange(6)) for number in range(script.randint(1, 6))]
    candidates = [(each, script.randint(1, 250)) for each in queue]
    free_slots, free_tokens = script.randint(0, 2), script.randint(0, 300)

    def planned(batch: Sequence[Job]) -> list[Admission]:
        kv = StandInKv(holding=lambda each: Holding(0, 0, freed[each], stays_whole=False))
        view = replace(IDLE, running=batch, kv=kv)
        admissions, needed_tokens = plan_admissions(
            candidates, free_slots=free_slots, free_tokens=free_tokens,
            prefill_tokens=IDLE.pass_tokens, view=view,
            preemptible=Preemptible(policy, view, [0] * len(batch), math.inf),
        )  # fmt: skip
        assert needed_tokens in (None, 0, *(num_tokens + 1 for _, num_tokens in candidates))
        return admissions

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


@pytest.mark.parametrize(
    ("left_tokens", "pass_tokens", "budget", "chunk_tokens"),
    [
        (100, 8192, Budget(), 112),
        (96, 8192, Budget(), 96),
        (5, 8192, Budget(), 16),
        (100, 64, Budget(), 64),
        (100, 8192, Budget(prefill_tokens=0), 16),
        (100, 8192, Budget(chunk_tokens=33), 48),
    ],
)
def test_a_chunk_takes_whole_pages_of_16(
    left_tokens: int, pass_tokens: int, budget: Budget, chunk_tokens: int
) -> None:
    assert budget.next_chunk_tokens(left_tokens, pass_tokens, 16) == chunk_tokens
