"""Predictions of when sessions return, and the KV that is kept for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_named
from sage_sched.job import Hints, Job
from sage_sched.limits import Limits
from sage_sched.session_returns import SessionReturns
from tests.sage_sched.strategies import SERVER, decide, waiting
from tests.sage_sched.test_cached import answered


def told(returns: SessionReturns, session: str, pauses_s: list[float], now_s: float = 0.0) -> float:
    """A session whose answers end at once; when the last one did."""
    if not now_s:
        pauses_s = [0.0, *pauses_s]
    for pause_s in pauses_s:
        now_s += pause_s
        returns.came(session, now_s)
        returns.left(session, now_s)
    return now_s


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


def test_of_two_that_are_away_the_one_is_worth_more_that_will_sooner_be_back() -> None:
    returns = learned()
    soon, late = told(returns, "soon", [8.0] * 9), told(returns, "late", [60.0] * 9)
    assert returns.rate("soon", soon + 4) > 2 * returns.rate("late", late + 4) > 0
    # It has been away for long enough that it may never return.
    assert returns.rate("soon", soon + 1500) < returns.rate("late", late + 4)


def test_one_whose_request_is_here_is_kept_before_all_others() -> None:
    returns = learned()
    told(returns, "a", [8.0] * 9)
    for _ in range(2):
        returns.came("a", 100.0)
    returns.left("a", 101.0)
    assert returns.rate("a", 101.0) == math.inf
    returns.left("a", 102.0)
    assert 0 < returns.rate("a", 103.0) < math.inf


def test_nothing_is_foreseen_of_a_stranger_nor_before_enough_is_known() -> None:
    returns = SessionReturns()
    told(returns, "a", [5.0] * 20)
    assert not returns.knows
    assert returns.rate("a", 101.0) == 0
    assert learned().rate("stranger", 0.0) == 0
    returns.left("never came", 0.0)


def test_what_a_client_says_counts_more_than_earlier_pauses() -> None:
    returns = learned()
    rates = {}
    for next_in_s in (8.0, 60.0, math.inf):
        now_s = told(returns, f"told {next_in_s}", [8.0] * 9)
        returns.came(f"told {next_in_s}", now_s)
        returns.left(f"told {next_in_s}", now_s, next_in_s)
        rates[next_in_s] = returns.rate(f"told {next_in_s}", now_s + 4)
    assert rates[8.0] == returns.rate("told 8.0", told(returns, "told 8.0", [8.0]) + 4)
    assert rates[8.0] > 2 * rates[60.0] > 0
    assert rates[math.inf] == 0


@pytest.mark.parametrize("is_unfinished", [True, False])
def test_a_session_that_is_closed_is_worth_nothing_unless_it_comes_all_the_same(
    is_unfinished: bool,
) -> None:
    returns = learned()
    now_s = told(returns, "a", [8.0] * 9)
    if is_unfinished:
        returns.came("a", now_s)
    returns.closed("a")
    assert (returns.rate("a", now_s) == math.inf) == is_unfinished
    if is_unfinished:
        returns.left("a", now_s)
    assert returns.rate("a", now_s + 4) == 0
    now_s = told(returns, "a", [8.0], now_s)
    assert returns.rate("a", now_s + 4) > 0


@pytest.mark.parametrize("most_come_back", [True, False])
def test_how_many_come_back_after_a_first_answer_is_learned(most_come_back: bool) -> None:
    returns = SessionReturns()
    for number in range(400):
        comes_back = most_come_back or number % 5 == 0
        told(returns, f"chat {number}", [0.0, *[8.0] * comes_back], 10.0 * number + 1)
    now_s = told(returns, "comes", [0.0, *[8.0] * 70], 5000.0)
    told(returns, "new", [0.0], now_s)
    share = returns.rate("new", now_s + 4) / returns.rate("comes", now_s + 4)
    assert 0.9 < share < 1.1 if most_come_back else 0.1 < share < 0.3


@pytest.mark.parametrize(
    "claim", [{"pause_ms": -1.0}, {"pause_ms": math.nan}, {"pause_ms": "9"}, {"ends_session": 1}]
)
def test_what_cannot_be_said_of_a_session_is_refused(claim: dict[str, Any]) -> None:
    (name,) = claim
    with pytest.raises(ValueError, match=rf"{name} is .*, allowed: "):
        Hints(**claim)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    returns = learned()
    monkeypatch.setattr("sage_sched.session_returns.MOST_SESSIONS", 8)
    assert returns.rate("soon 0", 1e4) > 0
    told(returns, "new", [8.0])
    assert returns.rate("soon 0", 1e4) == 0
    assert returns.rate("late 3", 1e4) > 0
    # Sessions whose answers are never reported as ended do not stay either.
    for i in range(9):
        returns.came(f"lost {i}", 2e4)
    assert returns.rate("lost 0", 2e4) == 0
    assert returns.rate("lost 1", 2e4) == math.inf


def test_nobody_enters_for_kv_that_is_worth_more_unless_nobody_runs() -> None:
    policy, sessions = policy_named("sage", {}, SERVER), SessionReturns()
    ended_s = 0.0
    for name in ("a", "b", "here"):
        ended_s = told(sessions, name, [6.0] * 70)
    sessions.came("here", ended_s)
    new, runs = answered(1, 400), answered(0, 400)
    for each in (runs, new):
        each.is_ranked = policy.on_arrival(each)
    runs.grow(1)
    pool = SERVER.kv_pool_tokens
    view = replace(
        waiting(new), now_s=ended_s + 5, running=[runs], free_tokens=300, evictable_tokens=800,
        locked_tokens=pool - 1100, kept_for=lambda: {"a": 700, "here": 50, "": 50}, can_swap=False,
    )  # fmt: skip
    limits = Limits(sessions=sessions)
    assert decide(view, policy, limits).kept_tokens == 700
    assert decide(replace(view, now_s=ended_s + 1500), policy, limits).kept_tokens == 0
    assert decide(replace(view, running=[]), policy, limits).kept_tokens == 0
    keeps_evicted = replace(SERVER, forgets=False)
    assert decide(replace(view, server=keeps_evicted), policy, limits).kept_tokens == 0


@pytest.mark.parametrize("name", ["sage", "proserve", "fcfs-fill"])
def test_sessions_are_kept_under_policies_that_say_so(name: str) -> None:
    limits = SageConfig().limits(policy_named(name, {}, SERVER))
    assert (limits.sessions is not None) is (name != "fcfs-fill")
    assert not limits.needs_clock
    job = Job(0, 10, 10, None, 0, arrival_s=1.0, hints=Hints(session="a"))
    limits.arrived(job)
    assert limits.needs_clock is (name != "fcfs-fill")
    if limits.sessions is not None:
        assert limits.sessions.rate("a", 1.0) == math.inf
    limits.ended(job, 2.0)
    if limits.sessions is not None:
        assert limits.sessions.rate("a", 2.0) == 0


def test_a_client_says_that_a_session_ends() -> None:
    limits = Limits(sessions=(sessions := SessionReturns()))
    ended_s = {name: told(sessions, name, [8.0] * 70) for name in ("goes on", "ends")}
    for name, now_s in ended_s.items():
        hints = Hints(session=name, ends_session=name == "ends")
        job = Job(0, 10, 10, None, 0, arrival_s=now_s, hints=hints)
        limits.arrived(job)
        limits.ended(job, now_s)
    rates = {name: sessions.rate(name, now_s + 4) for name, now_s in ended_s.items()}
    assert rates["goes on"] > rates["ends"] == 0
