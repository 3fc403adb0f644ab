"""The demo, which a newcomer sees first."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.experiment import demo


def test_the_report_opens_with_the_result_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(argparse.Namespace(simulate=True, seeds=1, output=tmp_path)) == 0
    text = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    places = [text.index(part) for part in ("sage finished answers", 'class="lanes"', "<table>")]
    assert places == sorted(places)
    assert (text.count("<svg"), "src=" in text, "href=" in text) == (2, False, False)
    # The best tuned policy has a queue, and sage a shorter one.
    said = capsys.readouterr().out
    rows = [line.split("  ") for line in said.splitlines() if line.startswith("`")]
    waited_s = {
        row[0].strip("`"): float([cell for cell in row[1:] if cell.strip()][5]) for row in rows
    }
    ours = waited_s.pop("sage")
    assert min(waited_s.values()) > max(2, ours)
    assert said.splitlines()[-1].startswith("sage finished answers in ")
