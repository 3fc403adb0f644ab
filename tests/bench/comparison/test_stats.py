from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.comparison.stats import (
    METRICS,
    headline,
    rows,
    sign_interval,
    summarize,
    table,
    with_interval,
)
from tests.bench.comparison.runs import run

SEEDS = range(5)


def test_ratios_are_paired_by_seed() -> None:
    # Each seed's load differs a hundredfold; its ratio does not.
    runs = [run("fcfs", seed, factor=10.0**seed) for seed in SEEDS]
    runs += [run("sage", seed, factor=0.5 * 10.0**seed) for seed in SEEDS]
    row = summarize(runs)["sage"]["2x"]["mean_e2e_latency_ms"]
    assert [row["ratio"], row["ratio_low"], row["ratio_high"]] == pytest.approx([0.5] * 3)
    assert row["median"] == pytest.approx(0.5 * 100.0 * 12.0)


def test_the_first_policy_is_what_the_others_are_held_against() -> None:
    runs = [run("lpm", seed, factor=2.0) for seed in SEEDS] + [run("fcfs", 0, factor=1.0)]
    summary = summarize(runs)
    assert summary["lpm"]["2x"]["duration"]["ratio"] == 1.0
    assert summary["fcfs"]["2x"]["duration"]["ratio"] == 0.5
    assert set(summary["fcfs"]["2x"]) == set(METRICS)


def test_rates_are_kept_apart() -> None:
    runs = [run("fcfs", 0, rate=rate) for rate in ("0.3x", "2x")]
    runs += [run("sage", 0, rate="0.3x"), run("sage", 0, rate="2x", factor=0.7)]
    summary = summarize(runs)
    assert summary["sage"]["0.3x"]["mean_ttft_ms"]["ratio"] == 1.0
    assert summary["sage"]["2x"]["mean_ttft_ms"]["ratio"] == pytest.approx(0.7)


def test_an_invalid_run_is_left_out_with_its_pair() -> None:
    runs = [run("fcfs", seed) for seed in SEEDS]
    runs += [run("sage", seed, factor=9.0 if seed == 0 else 0.5) for seed in SEEDS]
    runs[0]["valid"] = False
    assert summarize(runs)["sage"]["2x"]["mean_e2e_latency_ms"]["ratio_high"] == 0.5
    with pytest.raises(ValueError, match="no valid run"):
        summarize([{**run("fcfs", 0), "valid": False}])


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_interval_lies_within_the_values_and_around_their_median(
    size: int, random: object
) -> None:
    values = np.random.default_rng(size).normal(size=size).tolist()
    low, high = sign_interval(values)
    assert min(values) <= low <= float(np.median(values)) <= high <= max(values)


def test_the_interval_keeps_its_promise() -> None:
    generator = np.random.default_rng(0)
    for size in (5, 8, 20):
        hits = 0
        for _ in range(4000):
            low, high = sign_interval(generator.exponential(size=size).tolist())
            hits += low <= math.log(2) <= high
        assert hits / 4000 >= 0.9 - 0.02


def test_five_seeds_give_their_range_and_twenty_give_less() -> None:
    assert sign_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0)
    low, high = sign_interval([float(i) for i in range(20)])
    assert 0 < low < high < 19


def test_an_interval_is_shown_behind_the_median_with_as_many_digits() -> None:
    values = [0.3, 0.1, 0.125, 0.5, 0.25]
    assert with_interval(values) == "0.25 (0.10 to 0.50)"
    assert with_interval(values, digits=3) == "0.250 (0.100 to 0.500)"


def test_the_table_has_a_line_for_each_rate_and_policy() -> None:
    runs = [run(policy, 0, rate=rate) for policy in ("fcfs", "sage") for rate in ("0.3x", "2x")]
    summary = summarize(runs)
    head, body = rows(summary)
    assert [row[:2] for row in body] == [
        ["0.3x", "fcfs"], ["0.3x", "sage"], ["2x", "fcfs"], ["2x", "sage"],
    ]  # fmt: skip
    assert all(len(row) == len(head) for row in body)
    assert len(table(summary).splitlines()) == 2 + len(body)


def test_the_headline_is_about_sage_alone() -> None:
    runs = [run("fcfs", seed) for seed in SEEDS]
    assert headline(summarize(runs)) == ""
    runs += [run("sage", seed, factor=0.5) for seed in SEEDS]
    assert headline(summarize(runs)).endswith("under fcfs (0.50 to 0.50 over the seeds).")
    assert headline(summarize(runs[::-1])) == ""  # ratios to sage itself
