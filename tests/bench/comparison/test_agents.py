"""The command on recordings of its own making, simulated."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bench.comparison.agents import shrunk
from bench.engines.simulator.presets import H800_QWEN3_32B
from bench.engines.simulator.result import alone_s
from bench.workloads.agents import TRACE
from sage_sched.cli import main


def _record(folder: Path) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for number in range(40):
        length, at_s, steps = 15_000, 0.0, []
        for step in range(10):
            shared = 0 if step == 0 else length // 64 * 64
            length += int(generator.integers(500, 4000))
            steps.append([at_s, length, int(generator.integers(50, 900)), step - 1, shared])
            at_s += float(generator.exponential(20))
        rows.append(json.dumps({"session": f"s{number}", "requests": steps}))
    (folder / TRACE).write_bytes(gzip.compress("\n".join(rows).encode()))


def test_a_table_of_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(tmp_path)
    command = f"bench agents --data {tmp_path} --policies fcfs lpm sage --seeds 1 --rates 0.002 0.2"
    assert main([*command.split(), "--num-sessions", "10"]) == 0
    rows = [
        line.strip("| ").split(" | ")
        for line in capsys.readouterr().out.splitlines()
        if "simulated" in line
    ]
    assert [row[0] for row in rows] == [
        f"`{name}` simulated" for name in ("fcfs", "lpm", "sage")
    ] * 2
    quiet, crowded = rows[:3], rows[3:]
    # Nobody waits at first: the same for all, and nearly all that could be cached is.
    assert len({row[1] for row in quiet}) == 1
    assert all(float(row[6]) > 0.8 for row in quiet)
    assert all(
        float(one[1]) > 2 * float(other[1]) for one, other in zip(crowded, quiet, strict=True)
    )


def test_a_table_of_a_trace_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many ask about one of a few documents, some at once."""
    rows = [
        {
            "timestamp": 100 * (number // 2),
            "input_length": 2000,
            "output_length": 20 + 100 * (number % 2),
            "hash_ids": [4 * (number // 10) + block for block in range(3)] + [1000 + number],
        }
        for number in range(120)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    command = ["bench", "agents", "--mooncake", str(file), "--policies", "sage", "--rates", "1"]
    assert main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["policy"], row["rate"], row["by"]) == ("sage", 1.0, "simulated")
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f" | {row['step s']:.4g} | " in said
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--policies", "sega"])
    assert "unknown policy 'sega'" in capsys.readouterr().err
    assert "1 times as fast as recorded" in said
    cached = float(said.splitlines()[-1].split(" | ")[6])
    assert 0.6 < cached < 3 * 512 / 2000


def test_a_trace_of_one_request_foretells_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": []}
    file.write_text(json.dumps(row))
    assert main(["bench", "agents", "--mooncake", str(file)]) == 2
    assert "holds 1 requests, allowed: 2 or more" in capsys.readouterr().err


def test_without_recordings_there_is_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "agents", "--data", str(tmp_path)]) == 2
    assert "holds no sessions" in capsys.readouterr().err


def test_a_shrunk_engine_takes_as_long_for_a_shrunk_request() -> None:
    small = shrunk(H800_QWEN3_32B, 8.0)
    assert small.kv_pool_tokens == H800_QWEN3_32B.kv_pool_tokens // 8
    assert alone_s(small, 1000, 1) == pytest.approx(alone_s(H800_QWEN3_32B, 8000, 1))
