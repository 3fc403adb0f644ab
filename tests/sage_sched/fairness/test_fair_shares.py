"""Fair shares among the tenants of a class."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.fairness import FairShares
from sage_sched.job import Hints, Job
from sage_sched.order import serving_order
from sage_sched.policy import FcfsFill, NoParameters, Policy
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import SERVER, named, waiting

KNOWN = LengthDistribution.from_samples([100], "history")


def of(
    tenant: str, arrival: int, slo_class: str = "batch", fair: bool = True, **about: object
) -> Job:
    """Make a job of 100 input and 100 expected output tokens: a cost of 300."""
    weight = 2.0 if tenant == "heavy" else 1.0
    hints = Hints(weight=weight, tenant=tenant, slo_class=slo_class, shares_fairly=fair)
    return Job(arrival, 100, 1000, KNOWN, 0, hints=hints, **about)  # type: ignore[arg-type]


def ran(job: Job, served_tokens: int) -> Job:
    job.served_tokens = served_tokens
    return job


def look(policy: Policy, view: SchedulerView) -> list[Job]:
    """The order in which jobs are served."""
    if not isinstance(policy.queue.interleaving, FairShares):
        policy.queue.interleaving = FairShares()  # as decide() hands it on
    policy.queue.follow(view, policy)
    policy.queue.interleaving.look(view)
    return [view.waiting[position] for position in serving_order(policy, view)]


def in_turn(policy: Policy, *jobs: Job, **facts: object) -> str:
    """The first letters of the tenants in the order in which they are served."""
    order = look(policy, replace(waiting(*jobs), **facts))  # type: ignore[arg-type]
    return "".join(job.hints.tenant[:1] for job in order)


@pytest.mark.parametrize(
    ("tenants", "order"),
    [
        (["a"] * 5 + ["b", "b", "c"], "abcabaaa"),
        (["heavy"] * 6 + ["b"] * 3, "hbhhbhhbh"),  # a weight is a share
    ],
)
def test_tenants_take_turns_however_many_requests_they_have(tenants: list[str], order: str) -> None:
    assert in_turn(named("fcfs-fill"), *(of(t, n) for n, t in enumerate(tenants))) == order


def test_a_tenant_that_has_been_served_waits_for_the_others() -> None:
    policy, (first, *jobs) = named("fcfs-fill"), [of(t, n) for n, t in enumerate("aaabb")]
    assert in_turn(policy, first, *jobs) == "ababa"
    assert in_turn(policy, *jobs, running=[ran(first, 1000)]) == "bbaa"
    # When it has ended, all of its service still counts.
    ran(first, 1200)
    assert in_turn(policy, *jobs) == "bbaa"


def test_jobs_that_enter_and_end_between_two_plans_are_counted() -> None:
    policy, (first, *jobs) = named("fcfs-fill"), [of(t, n) for n, t in enumerate("aab")]
    assert in_turn(policy, first, *jobs) == "aba"
    ran(first, 1000)
    assert in_turn(policy, *jobs) == "ba"


def test_a_prompt_that_is_prefilled_in_chunks_is_counted_once() -> None:
    policy, one, other = named("fcfs-fill"), of("a", 0), of("b", 1)
    in_turn(policy, one, other)
    in_turn(policy, chunked=ran(one, 60))
    in_turn(policy, running=[ran(one, 100), ran(other, 130)])
    assert in_turn(policy, of("b", 2), of("a", 3)) == "ab"


def test_no_tenant_saves_up_service_by_staying_away() -> None:
    policy, old, next_one = named("fcfs-fill"), of("a", 0), of("a", 1)
    in_turn(policy, old, next_one)
    ran(old, 90_000)
    newcomers = [of(t, n) for n, t in enumerate("bbabab", 2)]
    assert in_turn(policy, next_one, *newcomers) == "abbabab"


def test_nor_by_coming_while_none_waits() -> None:
    policy, old, new = named("fcfs-fill"), of("a", 0), of("b", 1)
    in_turn(policy, old)
    in_turn(policy, running=[ran(old, 90_000)])
    in_turn(policy, new)
    assert in_turn(policy, new, *(of(t, n) for n, t in enumerate("abab", 2))) == "babab"


def test_promised_jobs_and_those_that_are_held_back_stay() -> None:
    class LastIsHeldBack(FcfsFill):
        def key(self, job: Job, view: SchedulerView) -> float:
            return math.inf if job.arrival == 5 else 0.0

    jobs = [of(tenant, arrival) for arrival, tenant in enumerate("aaabbb")]
    jobs[1].pass_starvation_bound()
    assert in_turn(LastIsHeldBack(NoParameters(), SERVER), *jobs) == "aababb"


def test_classes_and_levels_do_not_mix_and_others_keep_their_places() -> None:
    jobs = [of("a", 0), of("a", 1), of("s", 2, fair=False), of("x", 3, "chat"), of("b", 4)]
    assert in_turn(named("fcfs-fill"), *jobs) == "absxa"
    jobs = [of(tenant, n, level=n // 3) for n, tenant in enumerate("aabba")]
    order = look(named("fcfs-fill"), waiting(*jobs))
    assert [(job.hints.tenant, job.level) for job in order] == [
        ("a", 0), ("b", 0), ("a", 0), ("b", 1), ("a", 1),
    ]  # fmt: skip


def test_room_for_an_adapter_goes_to_the_tenant_whose_turn_it_is() -> None:
    policy, (first, *jobs) = named("fcfs-fill"), [of(t, n) for n, t in enumerate("aab")]
    in_turn(policy, first, *jobs)

    def one_adapter() -> Callable[[int], bool]:
        has_it: dict[str, int] = {}
        return lambda position: has_it.setdefault("one", position) == position

    found = in_turn(policy, *jobs, running=[ran(first, 1000)], adapters_in_order=one_adapter)
    assert found == "b"


@given(st.lists(st.tuples(st.sampled_from("abc"), *[st.booleans()] * 3), max_size=30), st.randoms())
def test_each_tenant_keeps_the_order_of_its_own(
    drawn: list[tuple[str, bool, bool, bool]], random: Random
) -> None:
    keys = random.sample(range(len(drawn)), len(drawn))

    class ByKey(FcfsFill):
        def key(self, job: Job, view: SchedulerView) -> float:
            return float(keys[job.arrival])

    def ordered(*, shares: bool) -> list[Job]:
        jobs = [
            of(tenant, n, fair=fair and shares, passed_starvation_bound=first, is_ranked=is_ranked)
            for n, (tenant, fair, first, is_ranked) in enumerate(drawn)
        ]
        return look(ByKey(NoParameters(), SERVER), waiting(*jobs))

    def takes_turns(job: Job) -> bool:
        return drawn[job.arrival][1] and not job.goes_first

    def of_tenant(jobs: list[Job], tenant: str) -> list[int]:
        return [job.arrival for job in jobs if job.hints.tenant == tenant and takes_turns(job)]

    found, without_turns = ordered(shares=True), ordered(shares=False)
    for job, other in zip(found, without_turns, strict=True):
        assert takes_turns(job) == takes_turns(other)
        assert takes_turns(job) or job.arrival == other.arrival
    for tenant in "abc":
        assert of_tenant(found, tenant) == of_tenant(without_turns, tenant)


def test_tenants_with_requests_are_not_forgotten_however_many_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sage_sched.fairness.service._MOST_NAMES", 10)
    policy, waits, runs = named("fcfs-fill"), of("waits", 0), of("runs", 1)
    first, other = of("waits", 2), of("runs", 3)
    in_turn(policy, waits, runs, first, other)
    ran(first, 1000)
    ran(other, 2000)
    in_turn(policy, waits, runs)
    for number in range(50):
        once = of(f"once {number}", 4 + number)
        in_turn(policy, waits, once, running=[runs])
        ran(once, 100)
    assert in_turn(policy, waits, of("runs", 60), of("waits", 61)) == "wwr"
    assert len(policy.queue.interleaving._service._had) == 10  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["sage", "proserve"])
def test_a_flood_of_one_tenant_does_not_hold_up_another(policy: str) -> None:
    """400 requests of one at once, then one of another each second, all predicted alike."""
    known = LengthDistribution.from_samples([300], "history")
    arrivals = [("flood", 0.01 * n) for n in range(400)] + [("drop", 1.0 + n) for n in range(40)]
    arrivals.sort(key=lambda arrival: arrival[1])
    is_drop = np.array([tenant == "drop" for tenant, _ in arrivals])
    waited_s: dict[bool, float] = {}
    for fair in (False, True):
        requests = [
            SimRequest(
                arrival_s=arrival_s, input_tokens=500, output_tokens=300, max_new_tokens=1000,
                distribution=known, class_name="",
                hints=Hints(tenant=tenant, slo_class="batch", shares_fairly=fair),
            )
            for tenant, arrival_s in arrivals
        ]  # fmt: skip
        result = simulate(H800_QWEN3_32B, policy, SageConfig(), requests, Options(preempt=True))
        waited_s[fair] = float(np.mean(result.ttft_s[is_drop]))
    assert waited_s[True] < 0.5 * waited_s[False]
