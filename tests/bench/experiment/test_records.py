"""Records, and pages whose tables are made of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.experiment import records, table
from bench.experiment.records import Provenance, Record
from bench.experiment.table import stale
from bench.experiment.table_command import pictures
from sage_sched.cli import main
from tests.bench.experiment.runs import record
from tests.pages import DOCS

MADE_BY = Provenance(commit="abc1234", command="sage-sched bench run paper")


@pytest.fixture
def found(tmp_path: Path) -> list[Record]:
    """Written to the folder."""
    found = [
        replace(record(arm, seed, factor=f), experiment="paper", made_by=MADE_BY, engine="sim")
        for arm, f in (("fcfs", 1.0), ("sage", 0.5))
        for seed in (0, 1)
    ]
    records.write(records.file_of("paper", tmp_path), found)
    return found


def test_a_record_is_read_as_it_was_written(tmp_path: Path, found: list[Record]) -> None:
    file = records.file_of("paper", tmp_path)
    assert records.read(file) == found
    records.write(file, [replace(found[-1], metrics={"duration": 1.23456789})])
    assert records.read(file)[-1].metrics == {"duration": 1.2346}
    assert records.read(file)[:-1] == found[:-1]
    records.write(file, [measured := replace(found[0], engine="clock")])  # joins the simulated one
    assert records.read(file)[-1] == measured
    assert len(records.read(file)) == len(found) + 1
    file.write_text("{}\n")
    with pytest.raises(ValueError, match=r"paper\.jsonl, line 1: is no record"):
        records.read(file)
    assert records.read(tmp_path / "nothing.jsonl") == []


def test_a_record_tells_its_command_without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["sage-sched", "bench", "run", "my own", "--data", "/d/e"])
    made_by = Provenance.of_now()
    assert made_by.command == "sage-sched bench run 'my own' --data PATH"
    assert "sglang " in made_by.versions


@pytest.mark.usefixtures("found")
def test_a_page_s_tables_are_made_from_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[Record]
) -> None:
    named = f"paper;{found[0].load};{{}}/fcfs;mean_e2e_latency_ms"
    best = f"paper;{found[0].load};min;mean_e2e_latency_ms"
    spec = {"head": ["policy", "mean", "best"], "cells": [named, best], "rows": [["sage", "ours"]]}
    monkeypatch.setitem(table._TABLES, "mine", spec)
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- figures: mine -->\n<!-- end -->\n\nAfter.\n")
    ((_, new),) = stale([page], tmp_path)
    assert "|policy|mean|best|\n|---|---|---|\n|ours|0.50|`sage` " in new
    assert (new[:8], new[-7:]) == ("Before.\n", "After.\n")
    page.write_text(new)
    assert list(stale([page], tmp_path)) == []
    page.write_text(new.replace("0.50", "0.49"))
    assert [found for found, _ in stale([page], tmp_path)] == [page]
    spec["cells"] = [f"{named};server"]
    with pytest.raises(ValueError, match="no record holds the figure"):
        list(stale([page], tmp_path))


def test_the_results_page_has_no_figure_that_is_not_a_record_s() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    rest = re.sub(r"<!-- figures: .*?<!-- end -->|`[^`]*`", "", text, flags=re.S)
    assert re.findall(r"\d+\.\d+|\d+ (?:%|ms\b|s\b)", rest) == []


def test_pages_and_pictures_agree_with_the_records() -> None:
    """If not: `sage-sched bench table --pages`."""
    pages = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    assert [page.name for page, _ in stale(pages)] == []
    for file, svg in pictures():
        assert file.read_text(encoding="utf-8") == svg, file.name


def test_every_record_has_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f.stem for f in records.FOLDER.glob("*.jsonl")]
    assert main(["bench", "table", *names]) == 0
    assert capsys.readouterr().out.count("Made by `") >= len(names)
