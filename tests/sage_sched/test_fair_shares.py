"""Fair shares among the tenants of a class."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.fair_shares import FairShares
from sage_sched.job import Hints, Job
from sage_sched.limits import Limits
from sage_sched.policy import FcfsFill, NoParameters, Policy
from sage_sched.view import SchedulerView
from tests.sage_sched.situations import HoldsLeastUrgent, Story
from tests.sage_sched.strategies import SERVER, decide, job, waiting

MARKS = {"-": "", "h": "[h]w2", "x": "[chat/x]", "d": "[d]d9000p90", "e": "[e]d9000p90"}


def story(policy: str | type[Policy] = "fcfs-fill") -> Story:
    return Story(policy, Limits(fair_shares=FairShares()))


def queue(tenants: str) -> str:
    """Jobs by arrival: the letter of each one's tenant and its marks (`-`: does not share, `.`:
    does not wait). Each has 100 input and 100 expected output tokens: a cost of 300."""
    jobs = [
        f"{arrival}:100%100{MARKS.get(word[0], f'[{word[0]}]')}{word[1:]}"
        for arrival, word in enumerate(tenants.split())
        if word != "."
    ]
    return f"wait {' '.join(jobs)}; full"


@pytest.mark.parametrize(
    ("policy", "passes"),
    [
        # Tenants take turns, with any number of requests. A weight is a share.
        ("fcfs-fill", [("a a a a a b b c", "", "0 5 7 1 6 2 3 4")]),
        ("fcfs-fill", [("h h h h h h b b b", "", "0 6 1 2 7 3 4 8 5")]),
        ("proserve", [("d d d e e", "", "0 3 1 4 2")]),
        # Served tenants wait for the others. When a job has ended, all of it counts.
        ("fcfs-fill", [("a a a b b", "", "0 3 1 4 2"), (". a a b b", "run 0:1v100+150", "3 1 4 2"),
                       (". a a b b", "gone 0:1v200+300", "3 4 1 2")]),
        ("fcfs-fill", [("h h h b b", "", "0 3 1 2 4"), (". h h b b", "run 0:1v400", "3 1 4 2")]),
        # A job enters and ends between two plans.
        ("fcfs-fill", [("a a b", "", "0 2 1"), (". a b", "gone 0:1v1000", "2 1")]),
        # A prompt that is prefilled in chunks, or begins again, counts once.
        ("fcfs-fill", [("a b -", "", "0 1 2"), (". . -", "chunk 0:1v60", "2; open 1"),
                       (". . -", "run 0:1v100 1:1v130", "2"), (". . - b a", "", "2 4 3")]),
        ("fcfs-fill", [("a b -", "", "0 1 2"), (". . -", "run 0:1v100 1:1v130", "2"),
                       ("a . -", "", "0 2"), (". . -", "run 0:1v120", "2"),
                       (". . - b a", "", "2 4 3")]),
        # No tenant saves up service by staying away, or by coming while no other waits.
        ("fcfs-fill", [("a a", "", "0 1"), (". a b b a b a b", "gone 0:1v90000", "1 2 3 4 5 6 7")]),
        ("fcfs-fill", [("a -", "", "0 1"), (". -", "run 0:1v90000", "1"), (". - b", "", "1 2"),
                       (". - b a b a b", "", "1 2 3 4 5 6")]),
        # Only waiting tenants set the service that a new tenant is assumed to have had.
        ("fcfs-fill", [("a b a", "", "0 1 2"),
                       (". . a c c c", "gone 0:1v1000 1:1v100", "2 3 4 5")]),
        # Promised jobs and held-back jobs keep their places.
        (HoldsLeastUrgent, [("a a! a b b bu5 bu5 au5", "", "1 0 3 2 4 5 6 7")]),
        # A job without an adapter slot costs no turn.
        ("fcfs-fill", [("a a b", "fits 1 2", "1 2")]),
        # Classes and levels do not mix, and others keep their places.
        ("fcfs-fill", [("a a - x b", "", "0 4 2 3 1")]),
        ("fcfs-fill", [("a a b b@1 a@1", "", "0 2 1 3 4")]),
    ],
)  # fmt: skip
def test_tenants_take_turns(policy: str | type[Policy], passes: list[tuple[str, str, str]]) -> None:
    server = story(policy)
    for tenants, facts, order in passes:
        assert server.plan(f"{queue(tenants)}; {facts}") == order


def test_room_for_an_adapter_goes_to_the_tenant_whose_turn_it_is() -> None:
    server = story()
    server.plan(queue("a a b"))
    ran = f"{queue('. a b')}; run 0:1v1000"
    assert server.plan(ran, kv={"fits_adapters": lambda names: len(names) <= 2}) == "2"


@given(st.lists(st.tuples(st.sampled_from("abc"), *[st.booleans()] * 2), max_size=30), st.randoms())
def test_each_tenant_keeps_the_order_of_its_own(
    drawn: list[tuple[str, bool, bool]], random: Random
) -> None:
    keys = random.sample(range(len(drawn)), len(drawn))

    class ByKey(FcfsFill):
        def key(self, job: Job, view: SchedulerView) -> float:
            return float(keys[job.arrival])

    def ordered(*, shares: bool) -> list[int]:
        jobs = [
            job(
                arrival, goes_first=first,
                hints=Hints(tenant=tenant, shares_fairly=fair and shares),
            )
            for arrival, (tenant, fair, first) in enumerate(drawn)
        ]  # fmt: skip
        limits = Limits(fair_shares=FairShares())
        for one in jobs:
            limits.arrived(one)
        return list(decide(waiting(*jobs), ByKey(NoParameters(), SERVER), limits).order)

    def whose(arrival: int) -> str:
        tenant, fair, first = drawn[arrival]
        return tenant if fair and not first else ""

    found, plain = ordered(shares=True), ordered(shares=False)
    assert [bool(whose(n)) or n for n in found] == [bool(whose(n)) or n for n in plain]
    for tenant in "abc":
        assert [n for n in found if whose(n) == tenant] == [n for n in plain if whose(n) == tenant]


def test_tenants_with_requests_are_never_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sage_sched.fair_shares._MOST_NAMES", 10)
    server, shares = story(), FairShares()
    server.core.limits = Limits(fair_shares=shares)
    server.plan(queue("w y r w y r"))
    server.plan(f"{queue('w y')}; run 2:1; gone 3:1v2000 4:1v1000 5:1v3000")
    for number in range(6, 56):
        server.plan(f"wait 0:1 1:1 {number}:1[once{number}]@{number}; run 2:1; full")
        server.plan(f"wait 0:1 1:1; run 2:1; gone {number}:1v100; full")
    assert server.plan("wait 0:1 1:1 60:1[r]; full") == "1 0 60"
    assert (len(shares._service._had), len(shares._by_tenant)) == (10, 1)
