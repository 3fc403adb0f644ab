"""What defines each rival of ProServe's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.policies.deadline_rivals import RIVALS
from sage_sched.config import DecodeConfig
from sage_sched.job import Hints, Job
from sage_sched.order import serving_order
from sage_sched.plan import UNLIMITED
from sage_sched.policy import NoParameters, Policy
from tests.sage_sched.strategies import SERVER, waiting

HIGH = Hints(weight=2.0, ttft_slo_ms=5000.0, tpot_slo_ms=100.0, slo_class="high")
LOW = Hints(weight=1.0, ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="low")


def job(arrival: int, hints: Hints) -> Job:
    return Job(arrival, 100, 100, None, 0, hints=hints)


def rival(name: str) -> Policy:
    return RIVALS[name](NoParameters(), SERVER)


@pytest.mark.parametrize(
    ("name", "low_first", "high_first"),
    [
        ("sarathi-fcfs", [0, 1], [0, 1]),
        ("sarathi-priority", [1, 0], [0, 1]),
        ("edf", [0, 1], [1, 0]),
        ("fairbatching", [0, 1], [0, 1]),
    ],
)
def test_the_order_of_each(name: str, low_first: list[int], high_first: list[int]) -> None:
    assert serving_order(rival(name), waiting(job(0, LOW), job(1, HIGH))) == low_first
    assert serving_order(rival(name), waiting(job(0, HIGH), job(1, LOW))) == high_first


@pytest.mark.parametrize("name", RIVALS)
def test_each_decides_itself_what_a_promised_tpot_is_worth(name: str) -> None:
    running = replace(waiting(), running=[job(0, HIGH)], pass_tokens=1 << 20)
    bound = DecodeConfig(max_gap_ms=math.inf).bound(rival(name)).gap
    assert bound.within(UNLIMITED, running) is UNLIMITED


def test_weighted_vtc_serves_the_class_that_has_had_least_for_its_weight() -> None:
    vtc = rival("weighted-vtc")
    high, low = job(0, HIGH), job(1, LOW)
    both = replace(waiting(job(2, HIGH), job(3, LOW)), running=[high, low])
    high.served_tokens, low.served_tokens = 150, 100
    vtc.on_pass(both)
    assert serving_order(vtc, both) == [0, 1]  # 150 over 2, against 100
    high.served_tokens = 250
    vtc.on_pass(both)
    assert serving_order(vtc, both) == [1, 0]


def test_fairbatching_prefills_as_much_as_the_slack_of_those_that_run_allows() -> None:
    running = replace(HIGH, ttft_slo_ms=1000.0)
    ahead, on_time = job(0, running), job(1, running)
    ahead.grow(40)
    on_time.grow(2)
    ours, view = rival("fairbatching"), waiting(job(2, LOW))
    much = ours.budget(replace(view, running=[ahead], now_s=1.0))
    little = ours.budget(replace(view, running=[ahead, on_time], now_s=1.15))
    assert much is not None
    assert little is not None
    assert (much.prefill_tokens or 0) > 10 * (little.prefill_tokens or 0) > 0
    assert ours.budget(view) is None


def test_sarathi_leaves_a_full_batch_its_time_per_token() -> None:
    ours, strict = rival("sarathi-fcfs"), replace(HIGH, tpot_slo_ms=60.0)
    budgets = [ours.budget(waiting(job(0, hints))) for hints in (HIGH, strict)]
    loose, tight = (budget.prefill_tokens for budget in budgets if budget is not None)
    assert loose is not None
    assert tight is not None
    assert loose > tight
    assert ours.budget(waiting(job(0, Hints()))) is None
