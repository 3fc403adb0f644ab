"""What is measured of the guess at urgency, on made-up recordings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.overhead import urgency_guess
from bench.triage import guess
from bench.triage.guess import INSTRUCTIONS, TASKS, Prompts
from bench.triage.requests import LABELS


@pytest.fixture
def folder(recordings: Path) -> Path:
    rows = [
        {
            "prompt": f"{'bleeding' if i % 5 < 2 else 'sore'} complaint {i}",
            "urgency_ktas": 1 + i % 5,
            "urgency_nurse": 1 + i % 5,
        }
        for i in range(100)
    ]
    others = [{"prompt": f"Write poem {i} of the sea"} for i in range(80)]
    for name, found in ((LABELS, rows), (INSTRUCTIONS, others), (TASKS, others[:20])):
        (recordings / name).write_bytes(gzip.compress("\n".join(map(json.dumps, found)).encode()))
    return recordings


def test_no_prompt_that_is_asked_was_learned_from(folder: Path) -> None:
    prompts = Prompts.read(folder)
    assert len(prompts.learned) == len(prompts.asked) == 40
    assert not {*prompts.learned} & {*prompts.asked}


def test_what_is_found_and_flagged_and_shouted_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guess.main(["--data", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "A nurse: 1.00 of levels 1 and 2 found, 0.40 of all flagged." in said
    learned, alone = said.split("A model of")[1:]
    assert "Levels 1 and 2: 1.00 of them found" in learned
    assert "| URGENT!!! writing tasks | 20 | 0.0000 |" in learned
    assert "No row is of no level" in alone
    assert guess.main(["--data", str(folder / "none")]) == 2


def test_each_guess_is_timed_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = urgency_guess.measure(Prompts.read(folder))
    lengths = [(len(wall_ms), len(thread_ms)) for wall_ms, thread_ms in measured.values()]
    assert lengths == [(100, 100), (40, 40), (20, 20), (160, 160)]
    assert urgency_guess.main(["--data", str(folder)]) == 0
    assert "p99" in capsys.readouterr().out
