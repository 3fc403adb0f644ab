"""Fair shares among the tenants of a class."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engines.simulator.presets import H800_QWEN3_32B
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.fairness import Name, Service, Tenants
from sage_sched.job import Hints, Job
from tests.sage_sched.strategies import IDLE, waiting

KNOWN = LengthDistribution.from_samples([100], "history")


def of(tenant: str, arrival: int, weight: float = 1.0, slo_class: str = "batch") -> Job:
    """Of 100 tokens in and, as far as is known, 100 out: a cost of 300."""
    hints = Hints(weight=weight, tenant=tenant, slo_class=slo_class, shares_fairly=True)
    return Job(arrival, 100, 1000, KNOWN, 0, hints=hints)


def in_turn(tenants: Tenants, *jobs: Job, num_open: int | None = None) -> str:
    """The tenants in the order in which they are served, who come in that of jobs."""
    order = list(range(len(jobs)))
    found = tenants.in_turn(order, len(jobs) if num_open is None else num_open, waiting(*jobs))
    return "".join(jobs[position].hints.tenant for position in found)


def test_tenants_take_turns_however_many_requests_they_have() -> None:
    jobs = [of(tenant, arrival) for arrival, tenant in enumerate("aaaaabbc")]
    assert in_turn(Tenants(), *jobs) == "abcabaaa"


def test_a_weight_is_a_share() -> None:
    jobs = [of(t, n, weight=2.0 if t == "a" else 1.0) for n, t in enumerate("aaaaaabbb")]
    assert in_turn(Tenants(), *jobs) == "abaabaaba"


def test_who_has_been_served_waits_for_who_has_not() -> None:
    tenants, jobs = Tenants(), [of(tenant, n) for n, tenant in enumerate("aaabb")]
    first = jobs[0]
    assert in_turn(tenants, *jobs) == "ababa"
    first.served_tokens = 1000
    running = replace(waiting(*jobs[1:]), running=[first])
    assert tenants.in_turn([0, 1, 2, 3], 4, running) == [2, 3, 0, 1]
    # Once it has ended, what it had at last still counts.
    first.served_tokens = 1200
    assert tenants.in_turn([0, 1, 2, 3], 4, waiting(*jobs[1:])) == [2, 3, 0, 1]
    assert tenants._service.of(("batch", "a")) == 1200


def test_nobody_saves_up_service_by_staying_away() -> None:
    tenants, old = Tenants(), of("a", 0)
    in_turn(tenants, old)
    old.served_tokens = 90_000
    assert in_turn(tenants, old, *(of(t, n) for n, t in enumerate("bbabab", 1))) == "abbabab"


def test_who_may_not_be_overtaken_and_who_is_held_back_stay() -> None:
    jobs = [of(tenant, arrival) for arrival, tenant in enumerate("aaabbb")]
    jobs[1].promise()
    assert in_turn(Tenants(), *jobs, num_open=5) == "aabab" + "b"


def test_classes_do_not_mix_and_others_keep_their_places() -> None:
    stranger = replace_hints(of("s", 2), shares_fairly=False)
    jobs = [of("a", 0), of("a", 1), stranger, of("x", 3, slo_class="chat"), of("b", 4)]
    assert in_turn(Tenants(), *jobs) == "abs" + "x" + "a"


def replace_hints(job: Job, **hints: object) -> Job:
    job.hints = replace(job.hints, **hints)  # type: ignore[arg-type]
    return job


def test_where_no_class_shares_fairly_nothing_is_looked_at() -> None:
    job = replace_hints(of("a", 0), shares_fairly=False)
    order = [0]
    assert Tenants().in_turn(order, 1, waiting(job)) is order


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=30))
def test_each_tenant_keeps_the_order_of_its_own(
    drawn: list[tuple[str, bool, bool]],
) -> None:
    jobs = [replace_hints(of(t, n), shares_fairly=fair) for n, (t, fair, _) in enumerate(drawn)]
    for job, (_, _, is_promised) in zip(jobs, drawn, strict=True):
        job.has_promise = is_promised
    order = list(range(len(jobs)))
    found = Tenants().in_turn(order, len(jobs), waiting(*jobs))
    assert sorted(found) == order
    of_tenant: defaultdict[str, list[int]] = defaultdict(list)
    for place, position in enumerate(found):
        if jobs[place].is_promised or not jobs[place].hints.shares_fairly:
            assert position == place
        else:
            of_tenant[jobs[position].hints.tenant].append(position)
    assert all(positions == sorted(positions) for positions in of_tenant.values())


def test_nor_by_coming_while_nobody_waits() -> None:
    tenants, old, new = Tenants(), of("a", 0), of("b", 1)
    in_turn(tenants, old)
    old.served_tokens = 90_000
    tenants.in_turn([], 0, replace(IDLE, running=[old]))
    in_turn(tenants, new)
    assert tenants._service.of(("batch", "b")) == 90_000
    assert in_turn(tenants, new, *(of(t, n) for n, t in enumerate("abab", 2))) == "babab"


def test_what_is_prefilled_in_chunks_is_counted_once() -> None:
    tenants, job = Tenants(), of("a", 0)
    in_turn(tenants, job)
    job.served_tokens = 60
    tenants.in_turn([], 0, replace(IDLE, chunked=job))
    job.served_tokens = 100
    tenants.in_turn([], 0, replace(IDLE, running=[job]))
    assert tenants._service.of(("batch", "a")) == 100


def test_who_waits_or_runs_is_not_forgotten_however_many_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sage_sched.fairness.tenants._MOST_NAMES", 10)
    tenants, waits, runs = Tenants(), of("waits", 0), of("runs", 1)
    had = {"waits": 1000, "runs": 2000}
    first = [of(tenant, 2) for tenant in had]
    in_turn(tenants, waits, runs, *first)
    for job in first:
        job.served_tokens = had[job.hints.tenant]
    in_turn(tenants, waits, runs)
    for number in range(50):
        once = of(f"once {number}", 3 + number)
        tenants.in_turn([0, 1], 2, replace(waiting(waits, once), running=[runs]))
        once.served_tokens = 100
    tenants.in_turn([0], 1, replace(waiting(waits), running=[runs]))
    service = tenants._service
    assert {name: service.of(("batch", name)) for name in had} == had
    assert len(service._had) == 10
    # Of the others, those that were served last.
    assert set(service._had) == {
        ("batch", name) for name in (*had, *(f"once {number}" for number in range(42, 50)))
    }


def test_of_more_names_than_are_remembered_all_that_wait_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sage_sched.fairness.tenants._MOST_NAMES", 3)
    service = Service(lambda job: (job.hints.slo_class, job.hints.tenant))
    service.look(waiting(*(of(tenant, n) for n, tenant in enumerate("abcde"))))
    assert [name for _, name in service._had] == ["a", "b", "c", "d", "e"]
    service.look(waiting(of("x", 5)))
    assert [name for _, name in service._had] == ["d", "e", "x"]
    service.look(IDLE)
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
    tenants = Tenants()
    old, new = ([of(f"{when} {n}", n) for n in range(500)] for when in ("old", "new"))
    in_turn(tenants, *old)
    in_turn(tenants, *old, *new)
    assert looked_at <= 5 * 1500


@pytest.mark.parametrize("policy", ["sage", "proserve"])
def test_a_flood_of_one_tenant_does_not_hold_up_another(policy: str) -> None:
    """400 requests of one at once, then one of another each second, all foreseen alike."""
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
