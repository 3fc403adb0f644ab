"""Records, and pages whose tables are made of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.experiment import records
from bench.experiment.records import Provenance, Record
from bench.experiment.table import stale
from bench.experiment.table_command import pictures
from tests.bench.experiment.runs import record
from tests.pages import DOCS

MADE_BY = Provenance(commit="abc1234", command="sage-sched bench run paper")
FIGURE = r"<!--[\w-]+;[^>]+-->[\d.]*\d"


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
    file.write_text("{}\n")
    with pytest.raises(ValueError, match=r"paper\.jsonl, line 1: is no record"):
        records.read(file)
    assert records.read(tmp_path / "nothing.jsonl") == []


@pytest.mark.usefixtures("found")
def test_a_number_that_no_record_holds_makes_a_page_stale(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- records: paper -->\n<!-- end of records -->\n\nAfter.\n")
    ((_, new),) = stale([page], tmp_path)
    assert "| `sage` | 0.50 |" in new
    assert "`sage-sched bench run paper` (commit abc1234, 2 seeds)" in new
    assert (new[:8], new[-7:]) == ("Before.\n", "After.\n")
    page.write_text(new)
    assert list(stale([page], tmp_path)) == []
    page.write_text(new.replace("0.50", "0.49"))
    assert [found for found, _ in stale([page], tmp_path)] == [page]


def test_a_figure_in_the_text_is_a_record_s(tmp_path: Path, found: list[Record]) -> None:
    page, text = tmp_path / "page.md", "It takes <!--{}-->{} of it.\n"
    named = f"paper;{found[0].load};sage/fcfs;mean_e2e_latency_ms"
    page.write_text(text.format(named, "0.50"))
    assert list(stale([page], tmp_path)) == []
    page.write_text(text.format(named, "0.49"))
    assert list(stale([page], tmp_path)) == [(page, text.format(named, "0.50"))]
    page.write_text(text.format(f"{named};server", "0.50"))
    with pytest.raises(ValueError, match="no record holds the figure"):
        list(stale([page], tmp_path))


def test_the_results_page_has_no_figure_that_is_not_a_record_s() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    assert len(re.findall(FIGURE, text)) > 50
    rest = re.sub(rf"{FIGURE}|`[^`]*`", "", text)
    assert re.findall(r"\d+\.\d+|\d+ (?:%|ms\b|s\b)|\| \d", rest) == []


def test_pages_and_pictures_say_what_the_records_say() -> None:
    """If not: `sage-sched bench table --pages`."""
    pages = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    assert [page.name for page, _ in stale(pages)] == []
    for file, svg in pictures():
        assert file.read_text(encoding="utf-8") == svg, file.name
