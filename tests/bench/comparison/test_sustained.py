"""The README's table, of runs that were not made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.comparison import sustained
from bench.comparison.plots import colors
from bench.comparison.stats import METRICS
from bench.workloads import synthetic
from bench.workloads.arrivals import poisson_arrivals
from bench.workloads.prompts import Workload, sample
from sage_sched.config import SageConfig
from sage_sched.registry import policy_names


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Workload:
    made = synthetic.generate(600, seed=0)
    monkeypatch.setattr(sustained, "load_workload", lambda data, name: made)
    return made


def run(workload: Workload, policy: str, seed: int, mean_s: float) -> dict[str, Any]:
    chosen = sample(workload.evaluation, 40, seed)
    return {
        "policy": policy,
        "rate": "2x",
        "seed": seed,
        "valid": True,
        **dict.fromkeys(METRICS, 1.0),
        "mean_e2e_latency_ms": 1e3 * mean_s,
        "settings": {
            "device clock": "h800-qwen3-32b",
            "speed": 4.0,
            "max_new_tokens": 2048,
            "sage": SageConfig().sections(),
        },
        "counters": {},
        "requests": {
            "class": [request.class_name for request in chosen],
            "input_tokens": [50] * 40,
            "output_tokens": [min(request.output_tokens, 2047) for request in chosen],
            "sent_ms": np.rint(1e3 * poisson_arrivals(40, seed)).tolist(),
        },
    }


def test_a_row_a_policy_and_the_clairvoyant_order_on_the_same_requests(
    workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In two files, as a comparison that was broken off and gone on with leaves them.
    files = []
    for policy, means_s in (("fcfs", (60.0, 80.0, 70.0)), ("sage", (30.0, 48.0, 21.0))):
        files.append(tmp_path / f"{policy}.jsonl")
        runs = (run(workload, policy, seed, mean_s) for seed, mean_s in enumerate(means_s))
        files[-1].write_text("".join(json.dumps(one) + "\n" for one in runs))
    assert sustained.main([*map(str, files), "--output", str(tmp_path)]) == 0
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert "no GPU was measured" in table
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows[0].startswith("| `fcfs` | 70.0 | 1.00 (1.00 to 1.00) |")
    assert rows[1].startswith("| `sage` | 30.0 | 0.50 (0.30 to 0.60) |")
    (clairvoyant,) = rows[2:]
    assert clairvoyant.startswith("| `clairvoyant`, simulated |")
    assert "nan" not in clairvoyant
    assert ">clairvoyant</text>" in (tmp_path / "sustained.svg").read_text()
    again = sustained.simulate_as("srpt-oracle", run(workload, "fcfs", 0, 60.0), workload)
    assert len(again.ttlt_s) == 40


def test_no_runs_are_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.jsonl").write_text("")
    assert sustained.main([str(tmp_path / "runs.jsonl"), "--output", str(tmp_path)]) == 2
    assert "no valid run" in capsys.readouterr().err


def test_ours_and_a_rival_of_each_kind_are_in_it() -> None:
    assert sustained.POLICIES[0] == "fcfs"
    ours = set(sustained.POLICIES) & set(policy_names())
    assert ours == {"uniboost", "fcfs-fill", "ssjf", "trail-prompt", "sage-order", "sage"}


def test_the_readmes_picture_has_a_colour_for_each_of_them() -> None:
    shown = [*sustained.POLICIES, sustained.CLAIRVOYANT]
    picture = (Path(__file__).parents[3] / "docs" / "sustained.svg").read_text(encoding="utf-8")
    legend = picture.split('id="legend_1"')[1]
    assert re.findall(r">([^<]+)</text>", legend) == sorted(shown, key=lambda name: name == "sage")
    drawn = re.findall(r"<use .*?fill: (#\w+)", legend)
    assert drawn == [*colors(shown).values()]
    assert len(set(drawn)) == len(shown)
