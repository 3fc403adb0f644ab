"""The class of a request, its promises, and their attainment."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.benchmark.goodput import calculate_goodput

from sage_sched.job import NO_HINTS, Hints
from sage_sched.slo import Attainment, Deadlines, SloClaims, SloClass, SloConfig, Tally

CLASSES = {
    "interactive": SloClass(10, 2.0, 1000.0, 50.0, min_ttft_slo_ms=500.0, min_tpot_slo_ms=25.0),
    "default": SloClass(0, 1.0, 5000.0, 100.0),
    "bulk": SloClass(-10, 0.5),
    "triage": SloClass(1, urgency=1, fair=True),
}


def claims(trust: str, classes: dict[str, SloClass] = CLASSES) -> SloClaims:
    default = "default" if classes else ""
    return SloClaims(SloConfig(trust, default, first_token_weight=7.0, classes=classes))


@pytest.mark.parametrize(
    ("trust", "header", "priority", "name"),
    [
        ("none", "bulk", 10, "default"),
        ("header", "bulk", 10, "bulk"),
        ("header", None, 10, "default"),
        ("header", "nobility", None, "default"),
        ("body", "bulk", 10, "interactive"),
        ("body", "bulk", None, "default"),
        ("body", None, 11, "default"),
        ("body", None, True, "default"),
        ("body", None, "10", "default"),
    ],
)
def test_classes_need_trust(trust: str, header: str | None, priority: object, name: str) -> None:
    assert claims(trust).class_of(header, priority) == name
    without = claims(trust, {})
    assert without.class_of(header, priority) == ""
    assert without.stats() == {"num_by_class": {}, "num_demoted": 0, "num_clamped": 0}


def test_claims_of_the_best_class_beyond_its_share_get_the_default() -> None:
    best = SloClass(priority=10, max_share=0.2)
    shared = claims("header", {"best": best, "default": SloClass()})
    for _ in range(10):
        shared.class_of("best", None, only_asks=True)
    granted = [shared.class_of("best", None) for _ in range(50)]
    assert shared.class_of("best", None, only_asks=True) == "default"
    granted += [shared.class_of("best", None) for _ in range(950)]
    assert granted[:21] == ["best"] * 20 + ["default"]
    assert max(Counter(granted[i : i + 100])["best"] for i in range(900)) <= 20
    stats = {"num_by_class": {"best": 200, "default": 800}, "num_demoted": 800, "num_clamped": 0}
    assert shared.stats() == stats
    # The share is available again when others have come.
    for _ in range(3):
        assert {shared.class_of(None, None) for _ in range(90)} == {"default"}
        assert [shared.class_of("best", None) for _ in range(10)] == ["best"] * 10


@pytest.mark.parametrize(
    ("trust", "name", "asked", "about", "found"),
    [
        # A trusted priority sets the urgency, unless the client or its class gives one.
        *(("body", "", {"urgency": given}, {"priority": priority}, {"urgency": urgency})
          for priority, given, urgency in (
              (1, 3, 2), (9, 3, 1), (-9, 3, 5), (9, 4, 4), (True, 3, 3))),
        ("header", "", {}, {"priority": 9}, {"urgency": 3}),
        ("none", "", {}, {"priority": 9}, {"urgency": 3}),
        ("header", "triage", {"urgency": 5}, {"priority": 0}, {"urgency": 1}),
        # A client may ask for its own deadlines, but not below the floors of its class.
        ("header", "interactive", {}, {},
         {"ttft_slo_ms": 1000.0, "tpot_slo_ms": 50.0, "weight": 2.0, "slo_class": "interactive",
          "first_token_weight": 7.0}),
        ("header", "interactive", {"ttft_slo_ms": 0.001, "tpot_slo_ms": 70.0}, {},
         {"ttft_slo_ms": 500.0, "tpot_slo_ms": 70.0, "num_clamped": 1}),
        ("header", "bulk", {"tpot_slo_ms": 70.0}, {}, {"ttft_slo_ms": None, "tpot_slo_ms": 70.0}),
        ("header", "bulk", {}, {}, {"ttft_slo_ms": None, "tpot_slo_ms": None, "weight": 0.5}),
        ("header", "bulk", {"weight": 1e-3}, {}, {"weight": 1e-3}),
        ("header", "interactive", {"weight": 1e3}, {}, {"weight": 1e3}),
        # A tenant is named by a header only if headers are trusted. A long name is cut.
        ("header", "triage", {"tenant": "own"}, {"tenant": "acme"},
         {"tenant": "acme", "shares_fairly": True}),
        ("header", "bulk", {}, {"tenant": "x" * 999}, {"tenant": "x" * 256}),
        ("body", "triage", {"tenant": "own"}, {"tenant": "acme"}, {"tenant": "own"}),
        ("none", "triage", {"tenant": "own"}, {"tenant": "acme"}, {"tenant": "own"}),
    ],
)  # fmt: skip
def test_a_client_and_its_class_set_hints_together(
    trust: str, name: str, asked: dict[str, Any], about: dict[str, Any], found: dict[str, Any]
) -> None:
    doors = claims(trust)
    hints = asdict(doors.hints(name, Hints(**asked), **about))
    hints["num_clamped"] = doors.stats()["num_clamped"]
    expected = {"num_clamped": 0} | found
    assert {field: hints[field] for field in expected} == expected


HIGH = Hints(weight=2.0, ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="high")
LOW = Hints(weight=1.0, ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="low")


def test_shares_are_those_of_sglangs_benchmark() -> None:
    # (TTFT, TTLT, tokens): good, late, slow, a single token.
    served = [(0.5, 1.0, 11), (1.5, 2.0, 6), (0.9, 1.95, 11), (1.0, 1.0, 1)]
    ours = Attainment()
    for ttft_s, last_s, num_tokens in served:
        ours.add(HIGH, ttft_s, last_s, num_tokens, 0)
    theirs = calculate_goodput(
        [
            SimpleNamespace(success=True, ttft=ttft_s, latency=last_s, output_len=n)
            for ttft_s, last_s, n in served
        ],
        {"ttft": 1000.0, "tpot": 100.0},
        10.0,
    )
    metrics = ours.metrics(10.0)
    assert metrics["request_goodput"] == theirs.request_goodput == 0.2
    assert metrics["slo_attainment"] == theirs.slo_attainment
    assert metrics["slo_attainment_by_metric"] == theirs.slo_attainment_by_metric


def test_gains_by_class_and_over_all() -> None:
    both = Attainment()
    both.add(HIGH, 0.5, 1.5, 11, 10)
    both.add(LOW, 2.0, 3.0, 11, 5)
    dear = replace(HIGH, first_token_weight=5.0, slo_class="dear")  # its first token counts 10
    both.add(dear, 0.5, 1.5, 11, 5)
    both.add(replace(dear, slo_class="late"), 2.0, 3.0, 11, 10)
    both.add(NO_HINTS, 99.0, 99.0, 1, 0)  # was promised nothing
    metrics = both.metrics(1.0)
    by_class = {"high": 22 / 22, "low": 5 / 11, "dear": 20 / 30, "late": 20 / 30}
    assert metrics["tdg_ratio_by_class"] == pytest.approx(by_class)
    assert metrics["tdg_ratio"] == pytest.approx((22 + 5 + 20 + 20) / (22 + 11 + 30 + 30))
    assert metrics["slo_attainment_by_class"]["high"] == 1.0
    assert metrics["slo_attainment_by_class"]["low"] == 0.0
    assert (Attainment().metrics(1.0), Tally().tdg_ratio) == ({}, 1.0)


def test_deadlines_of_a_request() -> None:
    promised = Deadlines.of(Hints(ttft_slo_ms=250.0, tpot_slo_ms=50.0))
    assert [promised.due_s(token) for token in (1, 2, 3)] == pytest.approx([0.25, 0.3, 0.35])
    assert Deadlines.of(Hints(ttft_slo_ms=250.0)) == Deadlines(0.25, math.inf)
    assert Deadlines.of(Hints()).due_s(1) == math.inf
