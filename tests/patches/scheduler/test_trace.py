"""What a trace is written with, and what happens when the disk is full."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.explain.command import events_of
from patches.scheduler.trace import Trace
from sage_sched import cli
from tests.engine.serving import wait_until


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ended(trace: Trace, rid: str) -> None:
    trace.ended(SimpleNamespace(rid=rid, output_ids=[1]), False)  # type: ignore[arg-type]


def test_only_its_owner_may_read_it_and_no_link_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch(0o644)
    trace = Trace(path)
    ended(trace, "a")
    wait_until(lambda: trace.stats()["num_written"] == 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    refused = Trace(link)
    wait_until(lambda: bool(refused.stats()["is_stopped"]))
    assert not (tmp_path / "elsewhere").exists()


def test_it_grows_to_its_limit_and_keeps_what_is_latest(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(path, max_bytes=2000)
    for i in range(200):
        ended(trace, f"request {i}")
    wait_until(lambda: trace.stats()["num_written"] == 200)
    wait_until(lambda: bool(read(path)) and read(path)[-1]["rid"] == "request 199")
    both = [event["rid"] for event in events_of(path)]
    assert both == [f"request {i}" for i in range(200 - len(both), 200)]
    assert len(both) > 30
    assert all(file.stat().st_size <= 2000 for file in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def flush(self) -> None:
            raise OSError("no space left on device")

    monkeypatch.setattr(Trace, "_opened", lambda self: Full())
    trace = Trace(tmp_path / "trace.jsonl")
    ended(trace, "a")
    wait_until(lambda: bool(trace.stats()["is_stopped"]))
    for i in range(10):
        ended(trace, f"{i}")
    assert trace.stats()["num_written"] <= 1
    assert not trace._lines  # nobody would take them


def test_a_disk_that_hangs_costs_lines_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patches.scheduler.trace._MOST_WAITING", 50)
    path = tmp_path / "trace.jsonl"
    os.mkfifo(path)  # nobody reads: to open it takes for ever
    trace = Trace(path)
    for i in range(80):
        ended(trace, f"{i}")
    assert trace.stats()["num_lost"] == 30


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    event = {"t": 1.0, "is": "ends", "rid": "a", "tokens": 3, "why": "done"}
    path.write_text(json.dumps(event) + '\nhalf a li\n[1]\n"x"\n')
    assert cli.main(["explain", "a", str(path)]) == 0
    assert "ends with 3 tokens" in capsys.readouterr().out
    assert cli.main(["explain", "b", str(path)]) == 1
    assert "knows no request b" in capsys.readouterr().err
    assert cli.main(["explain", "--summary", str(path)]) == 0
    assert cli.main(["explain", str(path)]) == 2
    assert cli.main(["explain", "a", str(tmp_path / "nowhere")]) == 1
