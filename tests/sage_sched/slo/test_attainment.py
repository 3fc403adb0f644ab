from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from sglang.benchmark.goodput import calculate_goodput

from sage_sched.job import NO_HINTS, Hints
from sage_sched.slo import Attainment, Deadlines, Tally

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
