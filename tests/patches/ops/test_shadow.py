from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.whatif.read import read_log
from patches.json_lines import JsonLines
from patches.ops.shadow import fields_of
from sage_sched.distribution import LengthDistribution
from tests.engine.serving import wait_until

SAID = LengthDistribution.from_samples([*range(1, 90)], "history", weights=range(1, 90))


def add(record: JsonLines, said: LengthDistribution | None = SAID, **changed: Any) -> None:
    line: dict[str, Any] = {
        "arrival_s": 1e9 + 0.123456, "input_tokens": 5, "output_tokens": 7, "max_new_tokens": 0,
        "is_cut": False, "ttlt_s": 1.5, "prediction": fields_of(said),
    }  # fmt: skip
    record.add(line | changed)
    wait_until(lambda: record.stats()["num_written"] == 1)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    add(JsonLines(file))
    # The server was started again.
    add(JsonLines(file), None, arrival_s=1e9 + 1.0, is_cut=True, max_new_tokens=7)
    one, other = read_log([file]).requests
    assert one.forecast is not None
    assert one.forecast.lengths.tolist() == SAID.lengths.tolist()
    assert one.forecast.crps(20) == pytest.approx(SAID.crps(20))
    assert (one.cap_tokens, one.ttlt_s, one.is_cut) == (0, 1.5, False)
    assert (other.forecast, other.cap_tokens, other.is_cut) == (None, 7, True)
    assert other.arrival_s == pytest.approx(1 - 0.123456, abs=1e-5)
