"""Urgent requests among others, on made-up recordings."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.triage.command import ratios
from bench.triage.requests import (
    BURST_REQUESTS,
    LABELS,
    LENGTHS,
    SHARES,
    arrivals_s,
    read_triage,
    said_by,
)
from bench.workloads.prompts import WorkloadError
from sage_sched.cli import main


def test_levels_have_their_shares_whoever_says_them_and_lengths_do_not_depend(
    recordings: Path,
) -> None:
    triage = read_triage(recordings)
    drawn = triage.drawn(2000, 5)
    expert, chance = (said_by(who, triage, drawn, 5) for who in ("expert", "chance"))
    counts = Counter(expert)
    assert [counts[level] / 2000 for level in range(1, 6)] == pytest.approx(SHARES, abs=0.03)
    assert Counter(chance) == counts
    assert chance != expert
    assert set(said_by("nobody", triage, drawn, 5)) == {3}
    one, other = (triage.requests(levels, [0.0] * 2000, 5) for levels in (expert, chance))
    assert [r.output_tokens for r in one] == [r.output_tokens for r in other]
    assert [r.hints.urgency for r in one] == expert
    # The answers that foretell are not among those that come.
    assert len(triage.history) + len(triage.lengths) == 60


def test_bursts_come_at_the_same_mean_rate() -> None:
    poisson, bursts = (arrivals_s(load, 4000, 10.0, 1) for load in ("poisson", "bursts"))
    assert poisson[-1] == pytest.approx(400, rel=0.1)
    assert bursts[-1] == pytest.approx(400, rel=0.25)
    assert set(Counter(bursts).values()) == {BURST_REQUESTS}


def test_the_table_shows_that_who_is_urgent_waits_less(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"bench urgency --data {recordings} --seeds 1 --num-requests 150"
    assert main(command.split()) == 0
    said = capsys.readouterr().out.split("bursts")[0]
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| `")]
    ttft_s = {(row[0], row[1]): float(row[7]) for row in rows if "(" not in row[2]}
    assert ttft_s["`urgency`", "expert"] < 0.5 * ttft_s["`fcfs`", "nobody"]
    assert ttft_s["`urgency`", "expert"] < ttft_s["`urgency`", "chance"]


def test_arms_and_loads_can_be_chosen_and_are_compared_seed_by_seed(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"bench urgency --data {recordings} --seeds 2 --num-requests 60 --loads bursts"
    assert main([*command.split(), "--arms", "sage", "urgency:expert"]) == 0
    said = capsys.readouterr().out
    assert "poisson" not in said
    assert "ratio to `sage`" in said
    assert "fcfs`" not in said
    assert said.count("| `urgency` | expert |") == 2
    assert main([*command.split(), "--arms", "sage", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["load"], row["arm"], row["seed"]) for row in rows] == [
        ("bursts", "sage", 0), ("bursts", "sage", 1),
    ]  # fmt: skip
    mean = np.mean([row["TTLT, s"] for row in rows])
    assert f" | {mean:.4g} | " in said


def test_a_ratio_is_of_the_same_seed_with_the_range_of_few() -> None:
    base = np.array([np.full(9, 1.0), np.full(9, 10.0), np.full(9, 100.0)])
    said = ratios({"fcfs": base, "sage": base * [[0.5], [0.7], [0.6]]}, "fcfs")
    assert said.count("0.60 (0.50 to 0.70)") == 9
    assert "| `fcfs` |" not in said


def test_without_recordings_there_is_nothing_to_simulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "urgency", "--data", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err
    for name in (LABELS, LENGTHS):
        (tmp_path / name).write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(WorkloadError, match=LABELS):
        read_triage(tmp_path)
