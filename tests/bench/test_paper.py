from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.paper.cases import figures
from sage_sched.cli import main


def test_every_figure_has_a_case_for_each_cell() -> None:
    known = figures()
    assert len({figure.name for figure in known}) == len(known)
    for figure in known:
        for _, cases in figure.rows:
            assert len(cases) == len(figure.columns)


def test_a_small_evaluation_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--figures", "11", "--seeds", "2", "--num-requests", "30"]
    assert main(["bench", "paper", *arguments, "--output", str(tmp_path)]) == 0
    text = (tmp_path / "results.md").read_text()
    assert text in capsys.readouterr().out
    # Three tables of three rules; the first row's ratio to itself is 1.
    assert len(re.findall(r"^\| `sage`.*1\.00 \(1\.00 to 1\.00\).*\|$", text, re.M)) == 3
    assert len(re.findall(r"^\| `sage-", text, re.M)) == 6
    assert (tmp_path / "report.html").read_text().count("<svg") == 1


def test_an_unknown_figure_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", "--figures", "99"]) == 2
    assert "7a, 7b, 8" in capsys.readouterr().err
