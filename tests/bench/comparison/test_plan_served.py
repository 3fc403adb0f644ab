"""The table of the plan language on servers, of runs that were not made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.comparison import plan_served


def run(policy: str, seed: int, mean_s: float) -> dict[str, Any]:
    return {
        "policy": policy,
        "rate": "2x",
        "seed": seed,
        "valid": True,
        "mean_e2e_latency_ms": 1e3 * mean_s,
        "p99_e2e_latency_ms": 4e3 * mean_s,
        "mean_ttft_ms": 500.0,
        "mean_waited_s": mean_s / 2,
        "output_throughput": 300.0,
        "counters": {"preemption": {"num_yields": 7}} if policy != "fcfs" else {},
    }


def test_a_row_a_policy_with_ratios_paired_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    means = {"fcfs": (30.0, 40.0), "sage": (20.0, 30.0), "trail": (10.0, 40.0), "sage+": (10, 15)}
    files = []
    for policy, means_s in means.items():
        files.append(tmp_path / f"{policy}.jsonl")
        rows = [run(policy, seed, mean_s) for seed, mean_s in enumerate(means_s)]
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan_served.main([str(file) for file in files]) == 0
    _, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert [row.split("|")[2].strip() for row in rows] == [f"`{policy}`" for policy in means]
    assert "| 0.500 (0.500 to 0.500) |" in rows[3]  # of sage's, at both seeds
    assert "| 0.688 (0.375 to 1.000) |" in rows[3]  # of trail's
    assert "| 0 |" in rows[0]
    assert "| 7 |" in rows[1]


def test_without_runs_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_served.main([])
    assert "--trail-probe are needed" in capsys.readouterr().err
