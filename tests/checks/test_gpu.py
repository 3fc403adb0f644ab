"""The checks for a GPU, run without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checks import gpu

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")


def report(folder: Path) -> dict[str, dict[str, object]]:
    found = json.loads((folder / "gpu-check.json").read_text())
    assert found["facts"]["sglang"]
    assert found["facts"]["cpu"]
    checks: dict[str, dict[str, object]] = found["checks"]
    return checks


@without_gpu
def test_without_a_gpu_every_check_is_skipped_with_a_reason(tmp_path: Path) -> None:
    assert gpu.main(["--output", str(tmp_path)]) == 0
    checks = report(tmp_path)
    assert tuple(checks) == gpu.NAMES
    assert {entry["status"] for entry in checks.values()} == {"skipped"}
    assert all("no GPU" in str(entry["why"]) for entry in checks.values())


def test_kv_moves_and_searches_on_the_cpu(tmp_path: Path) -> None:
    argv = ["--device", "cpu", "--only", "kv_move", "nearest", "--output", str(tmp_path)]
    assert gpu.main(argv) == 0
    checks = report(tmp_path)
    moved = checks["kv_move"]["found"]
    assert isinstance(moved, dict)
    assert moved["bit_exact"]
    assert moved["out_gb_per_s"] > 0
    searched = checks["nearest"]["found"]
    assert isinstance(searched, dict)
    assert searched["1000"]["faiss_cpu"]["recall"] > 0.99
    # Whole numbers of 8 bits, of clusters in which many are about as near.
    assert searched["1000"]["history"]["recall"] > 0.9
    assert str(searched["1000"]["faiss_gpu"]).startswith("left out") or torch.cuda.is_available()


@pytest.mark.server
def test_server_checks_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engines.server.fit.PHASES", ((1, 8), (8, 12)))
    argv = ["--device", "cpu", "--only", "serve", "--output", str(tmp_path)]
    assert gpu.main(argv) == 0
    found = report(tmp_path)["serve"]["found"]
    assert isinstance(found, dict)
    assert sum(found["num_ranked"].values()) >= 9
    assert set(found["measured_over_preset"]) == {
        "prefill 512", "prefill 4096", "decode 1 x 1000", "decode 64 x 1000", "decode 128 x 1000",
    }  # fmt: skip


@pytest.mark.server
@pytest.mark.long
def test_modes_that_a_cpu_runs_answer_as_fcfs_does(tmp_path: Path) -> None:
    names = [name for name, mode in gpu.MODES.items() if mode.on_cpu]
    argv = ["--device", "cpu", "--only", *names, "eagle", "--output", str(tmp_path)]
    assert gpu.main(argv) == 0
    checks = report(tmp_path)
    assert checks.pop("eagle")["status"] == "skipped"
    for name, entry in checks.items():
        found = entry["found"]
        assert isinstance(found, dict), name
        assert found["num_different"] == 0, name
