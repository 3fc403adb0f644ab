"""The checks for a GPU, run without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checks import gpu


def report(folder: Path, *names: str) -> dict[str, Any]:
    """Run the checks of these names on the CPU, and return their entries."""
    argv = ["--device", "cpu", "--output", str(folder)]
    assert gpu.main([*argv, "--only", *names]) == 0
    found: dict[str, Any] = json.loads((folder / "gpu-check.json").read_text())
    assert found["facts"]["sglang"]
    return {name: entry.get("found") for name, entry in found["checks"].items()}


def test_kv_moves_on_the_cpu(tmp_path: Path) -> None:
    found = report(tmp_path, "kv_move")["kv_move"]
    assert found["bit_exact"]
    assert found["out_gb_per_s"] > 0


@pytest.mark.server
def test_server_checks_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engines.server.fit.PHASES", ((1, 8), (8, 12)))
    found = report(tmp_path, "serve")["serve"]
    assert sum(found["num_predicted"].values()) >= 9
    assert len(found["measured_over_preset"]) == 5


@pytest.mark.server
@pytest.mark.long
def test_modes_that_a_cpu_runs_answer_as_fcfs_does(tmp_path: Path) -> None:
    names = [name for name, mode in gpu.MODES.items() if mode.on_cpu]
    checks = report(tmp_path, *names, "eagle")
    assert checks.pop("eagle") is None  # it is skipped
    assert {name: found["num_different"] for name, found in checks.items()} == dict.fromkeys(
        names, 0
    )
