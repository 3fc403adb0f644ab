from __future__ import annotations

import re

import numpy as np
import pytest

from bench.comparison.newcomers import LONG_SHARE, main, newcomers


def test_a_tenth_of_the_prompts_is_many_chunks_long() -> None:
    requests = newcomers(rate=4.0, number=2_000, seed=1)
    long = [request for request in requests if request.class_name == "long"]
    assert len(long) / len(requests) == pytest.approx(LONG_SHARE, abs=0.03)
    assert min(request.input_tokens for request in long) >= 2_000
    assert max(r.input_tokens for r in requests if r.class_name == "short") <= 200
    gaps_s = np.diff([request.arrival_s for request in requests])
    assert gaps_s.mean() == pytest.approx(0.25, rel=0.1)
    assert newcomers(rate=4.0, number=2_000, seed=1) == requests


def test_who_is_short_does_not_wait_for_all_of_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["newcomers", "--seeds", "3", "--num-requests", "120"])
    assert main() == 0
    rows = re.findall(
        r"^\| `(\w+)` simulated \| ([\d.]+) · ([\d.]+)", capsys.readouterr().out, re.M
    )
    assert [name for name, *_ in rows] == ["fcfs", "sage"]
    assert float(rows[1][2]) < 0.5
