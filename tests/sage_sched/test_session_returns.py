"""Predictions of when sessions return, and the KV that is kept for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sage_sched.job import Hints
from sage_sched.limits import Limits
from sage_sched.session_returns import SessionReturns
from tests.sage_sched.strategies import SERVER, StandInKv, core_of, job, named, waiting


def told(returns: SessionReturns, session: str, pauses_s: list[float], now_s: float = 0.0) -> float:
    """Report a session whose answers end at once. Return when the last one did."""
    for pause_s in pauses_s if now_s else [0.0, *pauses_s]:
        now_s += pause_s
        returns.came(session, now_s)
        returns.left(session, now_s)
    return now_s


@pytest.fixture
def learned() -> SessionReturns:
    """Four sessions return soon, four return late, and both kinds vary."""
    returns, rng = SessionReturns(), np.random.default_rng(0)
    now_s = {f"{kind} {number}": 0.0 for kind in ("soon", "late") for number in range(4)}
    for _ in range(80):
        for name in now_s:
            mean_s = 8.0 if name.startswith("soon") else 60.0
            now_s[name] = told(returns, name, [mean_s * rng.lognormal(0, 0.4)], now_s[name])
    return returns


def test_a_session_is_worth_more_the_sooner_it_will_be_back(learned: SessionReturns) -> None:
    pauses_s = {
        "back": [8.0] * 9, "slow": [60.0] * 9,
        "slower": [8.0] * 40 + [60.0] * 24, "faster": [60.0] * 40 + [8.0] * 24,
    }  # fmt: skip
    left_s = {name: told(learned, name, pauses) for name, pauses in pauses_s.items()}
    rates = {name: learned.rate(name, now_s + 4) for name, now_s in left_s.items()}
    # The latest pauses count.
    soon, late = 0.163276, 0.0156606
    worth = {"back": soon, "slow": late, "slower": late, "faster": soon}
    assert rates == pytest.approx(worth, rel=1e-4)
    # After such a long absence it may never return.
    assert learned.rate("back", left_s["back"] + 1500) < rates["slow"]
    assert learned.rate("stranger", 0.0) == 0


@pytest.mark.parametrize(
    ("events", "worth"),
    [
        ("comes", "here"), ("comes comes leaves", "here"), ("comes leaves", "soon"),
        ("leaves", "soon"),  # its request was never reported
        # What its client says counts more than its earlier pauses.
        ("comes leaves-for-8", "soon"), ("comes leaves-for-60", "late"),
        ("comes leaves-for-inf", "never"),
        # A closed session does not return, unless it comes all the same.
        ("closes", "never"), ("comes closes", "here"), ("comes closes leaves", "never"),
        ("comes closes comes leaves leaves", "soon"),
    ],
)  # fmt: skip
def test_the_worth_of_a_session_that_comes_back_soon(
    learned: SessionReturns, events: str, worth: str
) -> None:
    now_s, late_s = told(learned, "a", [8.0] * 9), told(learned, "b", [60.0] * 9)
    late = learned.rate("b", late_s + 4)
    for event in events.split():
        if event == "comes":
            learned.came("a", now_s)
        elif event == "closes":
            learned.closed("a")
        else:
            *_, next_in_s = event.split("-")
            learned.left("a", now_s, None if next_in_s == "leaves" else float(next_in_s))
    rate = learned.rate("a", now_s + 4)
    is_soon = "soon" if 2 * late < rate else "late"
    assert {math.inf: "here", 0.0: "never"}.get(rate, is_soon) == worth


def test_a_refused_turn_is_no_answer(learned: SessionReturns) -> None:
    now_s = told(learned, "a", [8.0] * 9)
    rate = learned.rate("a", now_s + 4)
    assert not SessionReturns().is_engaged
    for wait_s in (8.0, *[60.0] * 70):
        now_s += wait_s
        refused = job(arrival_s=now_s, hints=Hints(session="a", ends_session=True))
        learned.arrived(refused)
        learned.ended(refused, now_s)
    assert learned.rate("a", now_s + 4) == rate


@pytest.mark.parametrize(("every", "least", "most"), [(1, 0.9, 1.1), (5, 0.1, 0.3)])
def test_how_many_come_back_after_a_first_answer_is_learned(
    every: int, least: float, most: float
) -> None:
    returns = SessionReturns()
    told(returns, "few", [5.0] * 20)
    assert (returns.knows, returns.rate("few", 101.0)) == (False, 0.0)
    for number in range(2500):
        told(returns, f"chat {number}", [0.0, *[8.0] * (number % every == 0)], 10.0 * number + 1)
    now_s = told(returns, "comes", [0.0, *[8.0] * 70], 30_000.0)
    told(returns, "new", [0.0], now_s)
    rate = returns.rate("new", now_s + 4)
    assert least < rate / returns.rate("comes", now_s + 4) < most
    # Sessions that have just left, or were refused, do not count.
    for number in range(400):
        told(returns, f"now {number}", [0.0], now_s)
        returns.came(f"refused {number}", now_s)
        returns.left(f"refused {number}", now_s, was_answered=False)
    told(returns, "comes", [0.05] * 70, now_s)
    assert returns.rate("new", now_s + 4) == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize(
    "claim",
    [
        {"pause_ms": -1.0}, {"pause_ms": math.nan}, {"pause_ms": "9"}, {"ends_session": 1},
        {"session": "x" * 257}, {"tenant": None}, {"urgency": 0}, {"urgency": 6},
        {"urgency": True}, {"weight": 0.0}, {"ttft_slo_ms": 0.0}, {"tpot_slo_ms": math.inf},
    ],
)  # fmt: skip
def test_impossible_hints_are_refused(claim: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(claim))):
        Hints(**claim)


def test_remembered_sessions_are_bounded(
    learned: SessionReturns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_sched.session_returns.MOST_SESSIONS", 8)
    assert learned.rate("soon 0", 1e4) > 0
    told(learned, "new", [8.0])
    # Sessions without a reported end are forgotten too.
    for i in (*range(8), 1, 8, 9):
        learned.came(f"lost {i}", 2e4)
        learned.closed("lost 0")
    names = ("soon 0", "late 3", "lost 0", "lost 1", "lost 2")
    rates = [learned.rate(name, 2e4) for name in names]
    assert rates == [0, rates[1] or 1, 0, math.inf, 0]
    learned.left("lost 0", 2e4)
    assert learned.rate("lost 0", 2e4 + 4) > 0


@pytest.mark.parametrize(
    ("facts", "kept_tokens"),
    [
        ({}, 700),
        ({"locked_tokens": 300}, 0),  # with few running tokens, each stands for much work
        ({"now_s": 2000.0}, 0),
        ({"running": []}, 0),
        ({"server": replace(SERVER, forgets=False)}, 0),
    ],
)
def test_no_job_enters_for_kv_that_is_worth_more_unless_none_runs(
    facts: dict[str, Any], kept_tokens: int
) -> None:
    sessions, ended_s = SessionReturns(), 0.0
    for name in ("a", "b", "here"):
        ended_s = told(sessions, name, [6.0] * 70)
    sessions.came("here", ended_s)
    sessions.is_engaged = True
    runs, new = job(0, 400, 100, lengths=(30, 40), age=1), job(1, 400, 100, lengths=(30, 40))
    view = replace(
        waiting(new), now_s=ended_s + 5, running=[runs], room_tokens=1100,
        locked_tokens=8900, kv=StandInKv(kept_for=lambda: {"a": 700, "here": 50, "": 50}),
    )  # fmt: skip
    limits = Limits(sessions=sessions)
    core = core_of(named("sage", runs, new), limits)
    plan = core.plan(replace(view, **facts))
    assert core.headroom.kept_tokens == kept_tokens
    assert bool(plan.actions) == (not kept_tokens)
