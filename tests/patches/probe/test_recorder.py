"""Recorded hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from patches.probe.recorder import Recorder
from tests.engine.serving import wait_until
from tests.patches.probe.conftest import Rank
from tests.patches.schedulers import StandInBatch

ABOUT = {"hidden_size": 4, "fingerprint": "0"}


def record(recorder: Recorder, rank: Rank, age: int) -> None:
    batch: Any = StandInBatch([rank.req])
    commits = [SimpleNamespace(output_index=age)]
    recorder.read(batch, commits, np.zeros((1, 1, 4), np.float16))


def test_states_and_lengths_are_recorded_for_the_owner_alone(rank: Rank, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recorded", 1 << 30, [0], ABOUT)
    rank.probing.recorder = recorder
    for age in (1, 2, 3):
        record(recorder, rank, age)
    rank.job.grow(9)
    rank.probing.ended(rank.req, was_aborted=False)
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.rglob("*.answers.jsonl")))
    (answers,) = tmp_path.rglob("*.answers.jsonl")
    answer = json.loads(answers.read_text())
    assert (answer["tokens"], answer["is_cut"], answer["cap"]) == (9, False, 1000)
    assert answers.stat().st_mode & 0o077 == 0
    assert recorder.stats()["num_rows"] >= 2


def test_a_full_disk_ends_it(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kw: object) -> int:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "recorded", 1 << 30, [0], ABOUT)
    monkeypatch.setattr("patches.probe.recorder.own_file", full)
    record(recorder, rank, 1)
    wait_until(lambda: recorder.stats()["is_stopped"])
    record(recorder, rank, 2)
    assert recorder.stats()["num_rows"] == 1


def test_old_states_make_room(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.probe.recorder._SEGMENT_BYTES", 1000)
    recorder = Recorder(tmp_path, 3000, [0], ABOUT)
    for number in range(1, 401):
        record(recorder, rank, 1)
        if number % 100 == 0:
            wait_until(lambda: recorder._queue.empty())
    assert sum(path.stat().st_size for path in tmp_path.glob("*.rows")) < 4200
    assert len([*tmp_path.glob("*.rows")]) > 1
    assert recorder.stats()["num_dropped"] == 0
