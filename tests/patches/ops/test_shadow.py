"""The record of a server in shadow mode."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from bench.whatif.read import read_log
from patches.ops.shadow import ShadowRecord, refuse_place
from sage_sched.distribution import LengthDistribution

SAID = LengthDistribution.from_samples([*range(1, 90)], "history", weights=range(1, 90))


def add(record: ShadowRecord, **changed: Any) -> None:
    values: dict[str, Any] = {
        "arrival_s": 1e9 + 0.123456, "input_tokens": 5, "output_tokens": 7, "cap_tokens": 0,
        "is_cut": False, "ttlt_s": 1.5, "prediction": SAID,
    }  # fmt: skip
    record.add(**values | changed)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    file.write_text("")
    file.chmod(0o644)
    record = ShadowRecord(str(file))
    add(record)
    record.close()
    record = ShadowRecord(str(file))  # the server was started again
    add(record, arrival_s=1e9 + 1.0, prediction=None, is_cut=True, cap_tokens=7)
    assert record.stats()["num_written"] == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    one, other = read_log([file]).requests
    assert one.forecast is not None
    assert one.forecast.lengths.tolist() == SAID.lengths.tolist()
    assert one.forecast.crps(20) == pytest.approx(SAID.crps(20))
    assert (one.cap_tokens, one.ttlt_s, one.is_cut) == (0, 1.5, False)
    assert (other.forecast, other.cap_tokens, other.is_cut) == (None, 7, True)
    assert other.arrival_s == pytest.approx(1 - 0.123456, abs=1e-5)


def test_a_full_disk_ends_the_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ShadowRecord(str(tmp_path / "record.jsonl"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        add(record)
    add(record)
    assert record.stats() | {"file": ""} == {
        "file": "", "num_written": 0, "num_lost": 2, "is_stopped": True,
    }  # fmt: skip


def test_a_link_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("link", "no/such/folder", "."):
        for opens in (ShadowRecord, refuse_place):
            with pytest.raises(OSError):  # noqa: PT011
                opens(str(tmp_path / name))
    refuse_place(str(tmp_path / "record.jsonl"))
    assert not (tmp_path / "elsewhere").exists()


def test_no_prompt_has_a_place_in_it(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    record = ShadowRecord(str(file))
    add(record)
    assert set(json.loads(file.read_text())) == {
        "arrival_s", "input_tokens", "output_tokens", "max_new_tokens", "is_cut", "ttlt_s",
        "prediction",
    }  # fmt: skip
