"""The demo, which a newcomer sees first."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bench.experiment import demo
from bench.experiment.lanes import Lane, picture
from bench.experiment.records import Record
from tests.bench.experiment.runs import on_server


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a simulated demo's report."""
    folder = tmp_path_factory.mktemp("shown")
    args = argparse.Namespace(simulate=True, seeds=1, output=folder)
    assert demo.run(args) == 0
    return folder / "demo"


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_the_report_opens_with_one_sentence_and_one_picture_of_two_lanes(shown: Path) -> None:
    text = (shown / "report.html").read_text(encoding="utf-8")
    places = [text.index(part) for part in ("sage finished answers", 'class="lanes"', "<table>")]
    assert places == sorted(places)
    tags = _Tags(text).tags
    assert tags.count("svg") == 2
    assert tags.count("tr") == 1 + 4  # three that are tuned, sage
    assert "src=" not in text
    assert "href=" not in text
    assert "Simulated:" in text
    assert "If no request waits, no order can help" in text


def test_the_best_tuned_policy_has_a_queue_and_sage_a_shorter_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(argparse.Namespace(simulate=True, seeds=2, output=tmp_path)) == 0
    said = capsys.readouterr().out
    rows = [line.split("  ") for line in said.splitlines() if line.startswith("`")]
    waited_s = {
        row[0].strip("`"): float([cell for cell in row[1:] if cell.strip()][5]) for row in rows
    }
    ours = waited_s.pop("sage")
    assert min(waited_s.values()) > 2
    assert ours < min(waited_s.values())
    last = said.splitlines()[-1]
    assert re.match(r"sage finished answers in \d+ s on average, SGLang's .*: \d+ % sooner", last)
    ours_good, theirs_good = map(int, re.search(r"(\d+) were good.* (\d+) under", last).groups())
    assert ours_good > theirs_good


def test_a_lane_on_servers_is_that_of_the_first_valid_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Lane] = []

    def run(experiment: demo.Experiment, *_: object) -> list[Record]:
        load = experiment.loads[0].name
        return [
            replace(on_server(arm.policy, seed, problem, rate=load), arm=arm.name)
            for arm in experiment.arms
            for seed, problem in ((0, "late"), (1, "" if arm.policy == "sage" else "late"))
        ]

    monkeypatch.setattr(demo, "run_experiment", run)
    monkeypatch.setattr(demo, "picture", lambda lanes: drawn.extend(lanes) or "")
    # Some runs were invalid: told so, and no success.
    assert demo.run(argparse.Namespace(simulate=False, seeds=1, output=tmp_path)) == 1
    (lane,) = drawn
    assert (lane.arrival_s[0], lane.first_s[0], lane.last_s[0]) == (0.5, 0.6, 1.5)
    assert lane.is_ours


def test_lanes_share_one_scale_and_show_pauses_as_waiting() -> None:
    assert picture([]) == ""
    short, long = np.array([1.0]), np.array([10.0])
    page = picture(
        [Lane("a", short * 0, short, short, [[]]), Lane("b", long * 0, short, long, [[[4, 6]]])]
    )
    assert "M0.0 1.5H100.0" in page  # a tenth of the width
    assert "M100.0 1.5H1000.0" in page
    assert '<path d="M400.0 1.5H600.0" stroke="#c9c9c9"/>' in page
