"""Since when the requests of sessions count as waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.decide import decide
from sage_sched.distribution import LengthDistribution
from sage_sched.fairness import Sessions
from sage_sched.job import Hints, Job
from sage_sched.policies.sage import Sage, SageParameters
from tests.sage_sched.strategies import SERVER, waiting

KNOWN = LengthDistribution.from_samples([30, 40], "history")


def came(arrival: int, served: int, session: str = "") -> Job:
    return Job(arrival, 100, 100, KNOWN, served, hints=Hints(session=session))


def order(policy: Sage, *jobs: Job) -> list[int]:
    view = replace(waiting(*jobs), served_tokens=max(job.served_at_arrival_tokens for job in jobs))
    found = decide(view, policy).order
    assert found is not None
    return [jobs[position].arrival for position in found]


def arrived(policy: Sage, *jobs: Job) -> None:
    for job in jobs:
        assert policy.on_arrival(job)


def test_a_sessions_request_counts_as_come_when_it_began() -> None:
    for names, expected in ((("old", "young"), [4, 3]), (("", ""), [3, 4])):
        policy = Sage(SageParameters(), SERVER)
        one, other = names
        arrived(policy, came(0, 0, one), came(1, 50_000, other))
        young, old = came(3, 90_000, other), came(4, 91_000, one)
        arrived(policy, young, old)
        assert order(policy, young, old) == expected


def test_a_first_request_and_one_of_no_session_come_with_the_oldest_that_waits() -> None:
    policy = Sage(SageParameters(), SERVER)
    arrived(policy, came(0, 0, "old"), came(1, 50_000, "young"))
    old, young = came(2, 90_000, "old"), came(3, 90_000, "young")
    first, none = came(4, 91_000, "new"), came(5, 92_000)
    arrived(policy, old, young, first, none)
    assert order(policy, old, young, first, none) == [2, 4, 5, 3]


def test_without_sessions_nothing_is_moved() -> None:
    sessions = Sessions()
    jobs = [came(number, 1000 * number) for number in range(5)]
    assert [sessions.came_at(job) for job in jobs] == [0, 1000, 2000, 3000, 4000]
    assert sessions.moved_up(jobs) == ([], 0)
    # First requests alone move nobody either.
    assert sessions.came_at(came(5, 5000, "a")) == 5000
    assert sessions.moved_up(jobs) == ([], 0)


def test_a_revised_forecast_leaves_it_in_its_place() -> None:
    policy = Sage(SageParameters(), SERVER)
    arrived(policy, came(0, 0, "old"))
    old, later = came(1, 90_000, "old"), came(2, 90_000)
    arrived(policy, old)
    order(policy, old)
    arrived(policy, later)
    old.find(old.input_tokens // 2)
    old.find(0)
    policy.on_forecast(old)
    assert order(policy, old, later) == [1, 2]
    assert policy.key(old, waiting(old)) == policy.key(later, waiting(later))


def test_what_is_remembered_of_sessions_is_bounded() -> None:
    sessions = Sessions()
    for number in range(20_100):
        sessions.came_at(came(number, number, f"session {number}"))
        sessions.moved_up([])
    assert sessions.came_at(came(20_100, 99_999, "session 20099")) == 20_099
    assert sessions.came_at(came(20_101, 99_999, "session 0")) == 99_999
    assert len(sessions._began) <= 10_000


def test_of_too_many_sessions_those_are_forgotten_that_ask_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sage_sched.fairness.sessions._MOST_SESSIONS", 3)
    sessions = Sessions()
    for number in range(20):
        assert sessions.came_at(came(2 * number, 1000 * number, "goes on")) == 0
        once = came(2 * number + 1, 1000 * number, f"once {number}")
        assert sessions.came_at(once) == 1000 * number
    assert list(sessions._began) == ["once 18", "goes on", "once 19"]
