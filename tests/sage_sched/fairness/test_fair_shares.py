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
from sage_sched.fairness import FairShares, Name, Service
from sage_sched.job import Hints, Job
from sage_sched.limits import Limits
from sage_sched.order import serving_order
from sage_sched.policy import FcfsFill, NoParameters, Policy
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import IDLE, SERVER, decide, waiting

KNOWN = LengthDistribution.from_samples([100], "history")


def of(tenant: str, arrival: int, weight: float = 1.0, slo_class: str = "batch") -> Job:
    """Make a job of 100 input and 100 expected output tokens: a cost of 300."""
    hints = Hints(weight=weight, tenant=tenant, slo_class=slo_class, shares_fairly=True)
    return Job(arrival, 100, 1000, KNOWN, 0, hints=hints)


def by_arrival() -> FcfsFill:
    return FcfsFill(NoParameters(), SERVER)


def fair_shares(policy: Policy) -> FairShares:
    """Those of its line, which decide() hands on."""
    if not isinstance(policy.queue.interleaving, FairShares):
        policy.queue.interleaving = FairShares()
    return policy.queue.interleaving


def look(policy: Policy, view: SchedulerView) -> str:
    """The tenants in the order in which they are served."""
    fair_shares(policy)
    policy.queue.follow(view, policy)
    fair_shares(policy).look(view)
    order = serving_order(policy, view)
    return "".join(view.waiting[position].hints.tenant for position in order)


def in_turn(policy: Policy, *jobs: Job) -> str:
    return look(policy, waiting(*jobs))


def test_tenants_take_turns_however_many_requests_they_have() -> None:
    jobs = [of(tenant, arrival) for arrival, tenant in enumerate("aaaaabbc")]
    assert in_turn(by_arrival(), *jobs) == "abcabaaa"


def test_a_weight_is_a_share() -> None:
    jobs = [of(t, n, weight=2.0 if t == "a" else 1.0) for n, t in enumerate("aaaaaabbb")]
    assert in_turn(by_arrival(), *jobs) == "abaabaaba"


def test_who_has_been_served_waits_for_who_has_not() -> None:
    policy, jobs = by_arrival(), [of(tenant, n) for n, tenant in enumerate("aaabb")]
    first = jobs[0]
    assert in_turn(policy, *jobs) == "ababa"
    first.served_tokens = 1000
    assert look(policy, replace(waiting(*jobs[1:]), running=[first])) == "bbaa"
    # When it has ended, all of its service still counts.
    first.served_tokens = 1200
    assert in_turn(policy, *jobs[1:]) == "bbaa"
    assert fair_shares(policy)._service.of(("batch", "a")) == 1200


def test_who_enters_and_ends_between_two_plans_is_counted() -> None:
    policy, jobs = by_arrival(), [of(tenant, n) for n, tenant in enumerate("aab")]
    assert in_turn(policy, *jobs) == "aba"
    jobs[0].served_tokens = 1000
    assert in_turn(policy, *jobs[1:]) == "ba"


def test_nobody_saves_up_service_by_staying_away() -> None:
    policy, old, next_one = by_arrival(), of("a", 0), of("a", 1)
    in_turn(policy, old, next_one)
    old.served_tokens = 90_000
    newcomers = (of(t, n) for n, t in enumerate("bbabab", 2))
    assert in_turn(policy, next_one, *newcomers) == "abbabab"


def test_who_may_not_be_overtaken_and_who_is_held_back_stay() -> None:
    class LastIsHeldBack(FcfsFill):
        def key(self, job: Job, view: SchedulerView) -> float:
            return math.inf if job.arrival == 5 else 0.0

    jobs = [of(tenant, arrival) for arrival, tenant in enumerate("aaabbb")]
    jobs[1].pass_starvation_bound()
    assert in_turn(LastIsHeldBack(NoParameters(), SERVER), *jobs) == "aabab" + "b"


def test_classes_do_not_mix_and_others_keep_their_places() -> None:
    stranger = replace_hints(of("s", 2), shares_fairly=False)
    jobs = [of("a", 0), of("a", 1), stranger, of("x", 3, slo_class="chat"), of("b", 4)]
    assert in_turn(by_arrival(), *jobs) == "abs" + "x" + "a"


def replace_hints(job: Job, **hints: object) -> Job:
    job.hints = replace(job.hints, **hints)  # type: ignore[arg-type]
    return job


def test_room_for_an_adapter_goes_to_whose_turn_comes_first() -> None:
    jobs = [of(tenant, arrival) for arrival, tenant in enumerate("aab")]
    policy, first = by_arrival(), jobs[0]
    assert in_turn(policy, *jobs) == "aba"
    first.served_tokens = 1000

    def one_adapter() -> Callable[[int], bool]:
        has_it: dict[str, int] = {}
        return lambda position: has_it.setdefault("one", position) == position

    view = replace(waiting(*jobs[1:]), running=[first], adapters_in_order=one_adapter)
    assert look(policy, view) == "b"


@given(st.lists(st.tuples(st.sampled_from("abc"), *[st.booleans()] * 3), max_size=30), st.randoms())
def test_each_tenant_keeps_the_order_of_its_own(
    drawn: list[tuple[str, bool, bool, bool]], random: Random
) -> None:
    keys = random.sample(range(len(drawn)), len(drawn))

    class ByKey(FcfsFill):
        def key(self, job: Job, view: SchedulerView) -> float:
            return float(keys[job.arrival])

    def ordered(*, shares: bool) -> list[Job]:
        jobs = [of(tenant, n) for n, (tenant, *_) in enumerate(drawn)]
        for job, (_, fair, job.passed_starvation_bound, job.is_ranked) in zip(
            jobs, drawn, strict=True
        ):
            replace_hints(job, shares_fairly=fair and shares)
        policy = ByKey(NoParameters(), SERVER)
        fair_shares(policy)
        order = serving_order(policy, waiting(*jobs))
        return [jobs[position] for position in order]

    def of_tenant(jobs: list[Job], tenant: str) -> list[int]:
        return [job.arrival for job in jobs if job.hints.tenant == tenant and takes_turns(job)]

    def takes_turns(job: Job) -> bool:
        return drawn[job.arrival][1] and not job.goes_first

    found, without_turns = ordered(shares=True), ordered(shares=False)
    for job, other in zip(found, without_turns, strict=True):
        assert takes_turns(job) == takes_turns(other)
        assert takes_turns(job) or job.arrival == other.arrival
    for tenant in "abc":
        assert of_tenant(found, tenant) == of_tenant(without_turns, tenant)


def test_nor_by_coming_while_nobody_waits() -> None:
    policy, old, new = by_arrival(), of("a", 0), of("b", 1)
    in_turn(policy, old)
    old.served_tokens = 90_000
    look(policy, replace(IDLE, running=[old]))
    in_turn(policy, new)
    assert fair_shares(policy)._service.of(("batch", "b")) == 90_000
    assert in_turn(policy, new, *(of(t, n) for n, t in enumerate("abab", 2))) == "babab"


def test_what_is_prefilled_in_chunks_is_counted_once() -> None:
    policy, job = by_arrival(), of("a", 0)
    in_turn(policy, job)
    job.served_tokens = 60
    look(policy, replace(IDLE, chunked=job))
    job.served_tokens = 100
    look(policy, replace(IDLE, running=[job]))
    assert fair_shares(policy)._service.of(("batch", "a")) == 100


def test_who_waits_or_runs_is_not_forgotten_however_many_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sage_sched.fairness.service._MOST_NAMES", 10)
    policy, waits, runs = by_arrival(), of("waits", 0), of("runs", 1)
    had = {"waits": 1000, "runs": 2000}
    first = [of(tenant, n) for n, tenant in enumerate(had, 2)]
    in_turn(policy, waits, runs, *first)
    for job in first:
        job.served_tokens = had[job.hints.tenant]
    in_turn(policy, waits, runs)
    for number in range(50):
        once = of(f"once {number}", 4 + number)
        look(policy, replace(waiting(waits, once), running=[runs]))
        once.served_tokens = 100
    look(policy, replace(waiting(waits), running=[runs]))
    service = fair_shares(policy)._service
    assert {name: service.of(("batch", name)) for name in had} == had
    assert len(service._had) == 10
    # Of the other tenants, the ones served last are kept.
    assert set(service._had) == {
        ("batch", name) for name in (*had, *(f"once {number}" for number in range(42, 50)))
    }


def test_of_more_names_than_are_remembered_all_that_wait_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sage_sched.fairness.service._MOST_NAMES", 3)
    policy = by_arrival()
    service = fair_shares(policy)._service
    in_turn(policy, *(of(tenant, n) for n, tenant in enumerate("abcde")))
    assert [name for _, name in service._had] == ["a", "b", "c", "d", "e"]
    in_turn(policy, of("x", 5))
    assert [name for _, name in service._had] == ["d", "e", "x"]
    look(policy, IDLE)
    assert not service._counted


def test_many_that_begin_to_wait_at_once_are_each_looked_at_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = 0
    of_name = Service.of

    def counted(self: Service, name: Name) -> float:
        nonlocal looked_at
        looked_at += 1
        return of_name(self, name)

    monkeypatch.setattr(Service, "of", counted)
    policy = by_arrival()
    names = [f"{when} {n}" for when in ("old", "new") for n in range(500)]
    jobs = [of(tenant, n) for n, tenant in enumerate(names)]
    in_turn(policy, *jobs[:500])
    in_turn(policy, *jobs)
    assert looked_at <= 5 * 1500


def test_fair_shares_are_given_within_a_level() -> None:
    said = [("a", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    jobs = [of(tenant, n) for n, (tenant, _) in enumerate(said)]
    for one, (_, level) in zip(jobs, said, strict=True):
        one.level = level
    found = decide(waiting(*jobs), by_arrival(), Limits(interleaving=FairShares())).order
    assert found is not None
    assert [jobs[position].hints.tenant for position in found[:3]] == ["a", "b", "a"]
    assert {jobs[position].level for position in found[3:]} == {1}


@pytest.mark.parametrize("policy", ["sage", "proserve"])
def test_a_flood_of_one_tenant_does_not_hold_up_another(policy: str) -> None:
    """400 requests of one at once, then one of another each second, all predicted alike."""
    flood = [0.01 * number for number in range(400)]
    drops = [1.0 + number for number in range(40)]
    waited: dict[bool, float] = {}
    for fair in (False, True):
        requests = [
            SimRequest(
                arrival_s=arrival_s, input_tokens=500, output_tokens=300, max_new_tokens=1000,
                distribution=LengthDistribution.from_samples([300], "history"), class_name="",
                hints=Hints(tenant=tenant, slo_class="batch", shares_fairly=fair),
            )
            for tenant, arrivals in (("flood", flood), ("drop", drops)) for arrival_s in arrivals
        ]  # fmt: skip
        requests.sort(key=lambda request: request.arrival_s)
        result = simulate(H800_QWEN3_32B, policy, SageConfig(), requests, Options(preempt=True))
        is_drop = np.array([request.hints.tenant == "drop" for request in requests])
        waited[fair] = float(np.mean(result.ttft_s[is_drop]))
    assert waited[True] < 0.5 * waited[False]
