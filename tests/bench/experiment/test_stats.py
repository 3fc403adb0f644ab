from __future__ import annotations

import pytest

from bench.experiment.compare import as_experiment
from bench.experiment.stats import METRICS, headline, ratio, summarize
from bench.experiment.table import plain, rows
from tests.bench.experiment.runs import record, recorded, run

SEEDS = range(5)


def test_ratios_are_paired_by_seed() -> None:
    # Each seed's load differs a hundredfold; its ratio does not.
    found = [record("fcfs", seed, factor=10.0**seed) for seed in SEEDS]
    found += [record("sage", seed, factor=0.5 * 10.0**seed) for seed in SEEDS]
    row = summarize(found)["sage"]["2x"]["mean_e2e_latency_ms"]
    assert [row["ratio"], row["ratio_low"], row["ratio_high"]] == pytest.approx([0.5] * 3)
    assert row["median"] == pytest.approx(0.5 * 100.0 * 12.0)


def test_a_ratio_is_the_median_over_seeds_with_their_range() -> None:
    theirs = [record("fcfs", seed) for seed in range(3)]
    factors = (0.5, 0.9, 0.6)
    ours = [record("sage", seed, factor=f) for seed, f in enumerate(factors)]
    found = ratio(ours, theirs, "duration")
    assert str(found) == "0.60 (0.50 to 0.90)"
    assert str(ratio(ours[:1], theirs, "duration")) == "0.50"
    assert ratio(ours, [], "duration") is None


def test_the_first_policy_is_what_the_others_are_held_against() -> None:
    found = [record("lpm", seed, factor=2.0) for seed in SEEDS] + [record("fcfs", 0, factor=1.0)]
    summary = summarize(found)
    assert summary["lpm"]["2x"]["duration"]["ratio"] == 1.0
    assert summary["fcfs"]["2x"]["duration"]["ratio"] == 0.5
    assert set(summary["fcfs"]["2x"]) == set(METRICS)


def test_rates_are_kept_apart() -> None:
    found = [record("fcfs", 0, rate=rate) for rate in ("0.3x", "2x")]
    found += [record("sage", 0, rate="0.3x"), record("sage", 0, rate="2x", factor=0.7)]
    summary = summarize(found)
    assert summary["sage"]["0.3x"]["mean_ttft_ms"]["ratio"] == 1.0
    assert summary["sage"]["2x"]["mean_ttft_ms"]["ratio"] == pytest.approx(0.7)


def test_an_invalid_run_is_left_out_with_its_pair() -> None:
    runs = [run("fcfs", seed) for seed in SEEDS]
    runs += [run("sage", seed, factor=9.0 if seed == 0 else 0.5) for seed in SEEDS]
    runs[0]["valid"] = False
    summary = summarize(recorded(runs))
    assert summary["sage"]["2x"]["mean_e2e_latency_ms"]["ratio_high"] == 0.5
    with pytest.raises(ValueError, match="no valid run"):
        summarize([])


def test_the_table_has_a_line_for_each_rate_and_policy() -> None:
    found = [record(policy, 0, rate=rate) for rate in ("0.3x", "2x") for policy in ("fcfs", "sage")]
    head, body = rows(as_experiment(found), found)
    assert [row[:2] for row in body] == [
        ["0.3x", "`fcfs`"], ["0.3x", "`sage`"], ["2x", "`fcfs`"], ["2x", "`sage`"],
    ]  # fmt: skip
    assert all(len(row) == len(head) for row in body)
    assert len(plain(as_experiment(found), found).splitlines()) == 2 + len(body)


def test_the_headline_is_about_sage_alone() -> None:
    found = [record("fcfs", seed) for seed in SEEDS]
    assert headline(found) == ""
    found += [record("sage", seed, factor=0.5) for seed in SEEDS]
    assert headline(found).endswith("under fcfs (0.50 to 0.50 over the seeds).")
    assert headline(found[::-1]) == ""  # ratios to sage itself
