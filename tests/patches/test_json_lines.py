from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from patches.compat import UnsupportedServerError
from patches.json_lines import JsonLines
from patches.ops.explain_command import events_of
from patches.refusals import refuse_place
from tests.engine.serving import wait_until


def written(path: Path, lines: int = 1, **about: Any) -> JsonLines:
    """Write this many lines, and return when they are written, or writing has stopped."""
    file = JsonLines(path, **about)
    for number in range(lines):
        file.add({"t": 1.0, "is": "ends", "rid": f"{number}", "tokens": 3, "why": "done"})
    wait_until(lambda: file.stats()["num_written"] == lines or file.stats()["is_stopped"])
    return file


def test_only_its_owner_may_read_it_and_no_link_is_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "trace.jsonl", tmp_path / "link"
    path.touch(0o644)
    link.symlink_to(tmp_path / "elsewhere")
    assert written(path).stats() == {"num_written": 1, "num_lost": 0, "is_stopped": False}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert written(link).stats()["is_stopped"]
    assert {*tmp_path.iterdir()} == {path, link}


def test_it_grows_to_its_limit_and_keeps_the_latest_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    written(path, 200, max_bytes=2000)
    both = [event["rid"] for event in events_of(path)]
    assert both == [f"{number}" for number in range(200 - len(both), 200)]
    assert len(both) > 30
    size = max(map(len, path.read_bytes().splitlines(keepends=True)))
    before = (tmp_path / "trace.jsonl.1").stat().st_size
    assert 2000 - size < before <= 2000 >= path.stat().st_size


def test_a_full_disk_ends_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", 0)
    monkeypatch.setattr(JsonLines, "_opened", lambda self: full)
    file = written(tmp_path / "trace.jsonl")
    for _ in range(10):
        file.add({})
    assert file.stats() == {"num_written": 0, "num_lost": 11, "is_stopped": True}
    assert not file._lines  # no thread would take them


def test_a_hanging_disk_costs_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.json_lines._MOST_WAITING", 50)
    path = tmp_path / "trace.jsonl"
    os.mkfifo(path)  # opening a pipe without a reader blocks
    file = JsonLines(path)
    for _ in range(80):
        file.add({})
    assert file.stats()["num_lost"] == 30


def test_a_place_that_takes_no_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("link", "no/such/folder", "."):
        with pytest.raises(UnsupportedServerError, match="--sage-trace is"):
            refuse_place("--sage-trace", str(tmp_path / name))
    for name in ("file", "new.jsonl"):
        refuse_place("--sage-trace", str(tmp_path / name))
    assert {*tmp_path.iterdir()} == {tmp_path / "link", tmp_path / "file"}
