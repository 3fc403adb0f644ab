"""What is made of simulated and measured runs."""

from __future__ import annotations

import pytest

from bench.simulator.presets import PRESETS
from sage_sched.steps import StepTime
from tests.checks.validation import Point, engine_of, misordered, summarize, table


def point(policy: str, seed: int, measured_s: float, simulated_s: float) -> Point:
    return Point(policy, "2x", seed, (measured_s, 3 * measured_s), (simulated_s, 4 * simulated_s))


POINTS = [
    point("fcfs", 0, 10.0, 11.0), point("fcfs", 1, 30.0, 31.0),
    point("hrrn", 0, 9.0, 9.0), point("hrrn", 1, 29.0, 35.0),
    point("sage", 0, 5.0, 5.0), point("sage", 1, 15.0, 15.0),
]  # fmt: skip


def test_ratios_are_of_means_over_seeds() -> None:
    summary = summarize(POINTS)
    assert list(summary) == ["fcfs", "hrrn", "sage"]
    assert summary["fcfs"]["2x"]["mean_ratio"] == pytest.approx(42 / 40)
    assert summary["fcfs"]["2x"]["p99_ratio"] == pytest.approx(42 / 40 * 4 / 3)
    assert ["2x", "fcfs", "20.00", "21.00", "1.05"] in [
        r.split()[:5] for r in table(POINTS).splitlines()
    ]


def test_policies_further_apart_than_the_margin_must_be_ordered_alike() -> None:
    # hrrn is 5 % before fcfs, measured, and behind it, simulated: 19 / 20 is within the margin,
    # 18 / 20 is not.
    assert misordered(POINTS) == ["2x: fcfs / hrrn is 1.05, simulated 0.95"]
    nearer = [p if p.policy != "hrrn" else point("hrrn", p.seed, 19.5, 22.0) for p in POINTS]
    assert misordered(nearer) == []


def test_the_engine_of_a_run_is_its_device_clocks_or_what_its_flags_say() -> None:
    assert engine_of({"device clock": "h800-qwen3-32b"}, None) is PRESETS["h800-qwen3-32b"]
    flags = "--max-total-tokens 16384 --max-running-requests 32 --page-size 16"
    settings = {"server flags": flags, "server environment": {}}
    with pytest.raises(ValueError, match="--step-time"):
        engine_of(settings, None)
    step_time = StepTime(1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    engine = engine_of(settings, step_time)
    assert (engine.kv_pool_tokens, engine.page_size, engine.step_time) == (16384, 16, step_time)
