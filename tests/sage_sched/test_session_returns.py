"""Predictions of when sessions return, and the KV that is kept for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sage_sched.app.config import SageConfig
from sage_sched.job import Hints
from sage_sched.limits import Limits
from sage_sched.session_returns import SessionReturns
from tests.sage_sched.strategies import SERVER, decide, job, named, waiting


def told(returns: SessionReturns, session: str, pauses_s: list[float], now_s: float = 0.0) -> float:
    """A session whose answers end at once; when the last one did."""
    for pause_s in pauses_s if now_s else [0.0, *pauses_s]:
        now_s += pause_s
        returns.came(session, now_s)
        returns.left(session, now_s)
    return now_s


@pytest.fixture
def learned() -> SessionReturns:
    """Four sessions are soon back, four after long, and both kinds vary."""
    returns, rng = SessionReturns(), np.random.default_rng(0)
    now_s = {f"{kind} {number}": 0.0 for kind in ("soon", "late") for number in range(4)}
    for _ in range(80):
        for name in now_s:
            mean_s = 8.0 if name.startswith("soon") else 60.0
            pauses_s = [mean_s * rng.lognormal(0, 0.4)]
            now_s[name] = told(returns, name, pauses_s, now_s[name])
    return returns


def test_a_session_is_worth_more_the_sooner_it_will_be_back(learned: SessionReturns) -> None:
    soon, late = told(learned, "soon", [8.0] * 9), told(learned, "late", [60.0] * 9)
    assert learned.rate("soon", soon + 4) > 2 * learned.rate("late", late + 4) > 0
    # It has been away for long enough that it may never return.
    assert learned.rate("soon", soon + 1500) < learned.rate("late", late + 4)


def test_one_whose_request_is_here_is_kept_before_all_others(learned: SessionReturns) -> None:
    told(learned, "a", [8.0] * 9)
    for _ in range(2):
        learned.came("a", 100.0)
    learned.left("a", 101.0)
    assert learned.rate("a", 101.0) == math.inf
    learned.left("a", 102.0)
    assert 0 < learned.rate("a", 103.0) < math.inf


def test_nothing_is_foreseen_of_a_stranger_nor_before_enough_is_known(
    learned: SessionReturns,
) -> None:
    returns = SessionReturns()
    told(returns, "a", [5.0] * 20)
    assert not returns.knows
    assert returns.rate("a", 101.0) == 0
    learned.left("never came", 0.0)
    assert learned.rate("stranger", 0.0) == 0


def test_what_a_client_says_counts_more_than_earlier_pauses(learned: SessionReturns) -> None:
    rates = {}
    for next_in_s in (8.0, 60.0, math.inf):
        name = f"told {next_in_s}"
        now_s = told(learned, name, [8.0] * 9)
        learned.came(name, now_s)
        learned.left(name, now_s, next_in_s)
        rates[next_in_s] = learned.rate(name, now_s + 4)
    assert rates[8.0] == learned.rate("told 8.0", told(learned, "told 8.0", [8.0]) + 4)
    assert rates[8.0] > 2 * rates[60.0] > 0
    assert rates[math.inf] == 0


@pytest.mark.parametrize("is_unfinished", [True, False])
def test_a_session_that_is_closed_is_worth_nothing_unless_it_comes_all_the_same(
    learned: SessionReturns, is_unfinished: bool
) -> None:
    now_s = told(learned, "a", [8.0] * 9)
    if is_unfinished:
        learned.came("a", now_s)
    learned.closed("a")
    assert (learned.rate("a", now_s) == math.inf) == is_unfinished
    if is_unfinished:
        learned.left("a", now_s)
    assert learned.rate("a", now_s + 4) == 0
    now_s = told(learned, "a", [8.0], now_s)
    assert learned.rate("a", now_s + 4) > 0


@pytest.mark.parametrize(("every", "least", "most"), [(1, 0.9, 1.1), (5, 0.1, 0.3)])
def test_how_many_come_back_after_a_first_answer_is_learned(
    every: int, least: float, most: float
) -> None:
    returns = SessionReturns()
    for number in range(400):
        told(returns, f"chat {number}", [0.0, *[8.0] * (number % every == 0)], 10.0 * number + 1)
    now_s = told(returns, "comes", [0.0, *[8.0] * 70], 5000.0)
    told(returns, "new", [0.0], now_s)
    assert least < returns.rate("new", now_s + 4) / returns.rate("comes", now_s + 4) < most


@pytest.mark.parametrize(
    "claim", [{"pause_ms": -1.0}, {"pause_ms": math.nan}, {"pause_ms": "9"}, {"ends_session": 1}]
)
def test_what_cannot_be_said_of_a_session_is_refused(claim: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(claim))):
        Hints(**claim)


def test_what_is_remembered_is_bounded(
    learned: SessionReturns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_sched.session_returns.MOST_SESSIONS", 8)
    assert learned.rate("soon 0", 1e4) > 0
    told(learned, "new", [8.0])
    assert learned.rate("soon 0", 1e4) == 0
    assert learned.rate("late 3", 1e4) > 0
    # Sessions whose answers are never reported as ended do not stay either.
    for i in range(9):
        learned.came(f"lost {i}", 2e4)
    assert learned.rate("lost 0", 2e4) == 0
    assert learned.rate("lost 1", 2e4) == math.inf


def test_no_job_enters_for_kv_that_is_worth_more_unless_none_runs() -> None:
    sessions, ended_s = SessionReturns(), 0.0
    for name in ("a", "b", "here"):
        ended_s = told(sessions, name, [6.0] * 70)
    sessions.came("here", ended_s)
    runs, new = job(0, 400, 100, lengths=(30, 40), age=1), job(1, 400, 100, lengths=(30, 40))
    policy, limits = named("sage", runs, new), Limits(sessions=sessions)
    view = replace(
        waiting(new), now_s=ended_s + 5, running=[runs], free_tokens=300, evictable_tokens=800,
        locked_tokens=SERVER.kv_pool_tokens - 1100, can_swap=False,
        kept_for=lambda: {"a": 700, "here": 50, "": 50},
    )  # fmt: skip
    for facts, kept_tokens in (
        ({}, 700),
        ({"now_s": ended_s + 1500}, 0),
        ({"running": []}, 0),
        ({"server": replace(SERVER, forgets=False)}, 0),
    ):
        assert decide(replace(view, **facts), policy, limits).kept_tokens == kept_tokens


@pytest.mark.parametrize(
    ("name", "is_kept"), [("sage", True), ("proserve", True), ("fcfs-fill", False)]
)
def test_sessions_are_kept_under_policies_that_say_so(name: str, is_kept: bool) -> None:
    limits = SageConfig().limits(named(name))
    one = job(arrival_s=1.0, hints=Hints(session="a"))
    assert (limits.sessions is not None, limits.needs_clock) == (is_kept, False)
    limits.arrived(one)
    assert limits.needs_clock is is_kept
    if limits.sessions is not None:
        assert limits.sessions.rate("a", 1.0) == math.inf
    limits.ended(one, 2.0)
    if limits.sessions is not None:
        assert limits.sessions.rate("a", 2.0) == 0


@pytest.mark.parametrize("ends", [True, False])
def test_a_client_says_that_a_session_ends(ends: bool) -> None:
    limits = Limits(sessions=(sessions := SessionReturns()))
    now_s = told(sessions, "a", [8.0] * 70)
    one = job(arrival_s=now_s, hints=Hints(session="a", ends_session=ends))
    limits.arrived(one)
    limits.ended(one, now_s)
    assert (sessions.rate("a", now_s + 4) == 0) is ends
