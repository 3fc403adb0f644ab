"""What a newcomer sees first."""

from __future__ import annotations

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bench.experiment import demo
from bench.experiment.lanes import Lane, picture
from bench.experiment.run import Options
from tests.browser import BROWSER, measured


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
    places = [text.index(part) for part in ("Under sage an answer", 'class="lanes"', "<table>")]
    assert places == sorted(places)
    tags = _Tags(text).tags
    assert tags.count("svg") == 2
    assert tags.count("tr") == 1 + 4  # three that are tuned, sage
    assert "src=" not in text
    assert "href=" not in text
    assert "Simulated:" in text
    assert "If nobody waits, no order can help" in text


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
    assert last.startswith("Under sage an answer was complete after ")
    ours_good, theirs_good = map(
        int, re.search(r"(\d+)% instead of (\d+)% were good", last).groups()
    )
    assert ours_good > theirs_good


def test_a_lane_on_servers_is_read_from_what_they_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {"sent_ms": [500, 1500], "ttft_ms": [100, 200], "e2e_latency_ms": [1000, 3000]}
    drawn: list[Lane] = []

    def served(experiment: demo.Experiment, options: Options, on_record: object) -> list[object]:
        runs = [
            run
            for arm in experiment.arms
            for run in (
                {"policy": arm.policy, "seed": 0, "valid": False, "errors": ["late"]},
                {"policy": arm.policy, "seed": 1, "valid": True, "requests": requests},
            )
            if run["valid"] or arm.policy == "sage"
        ]
        folder = options.output / experiment.name
        folder.mkdir(parents=True)
        (folder / "runs.jsonl").write_text("".join(f"{json.dumps(run)}\n" for run in runs))
        return []

    monkeypatch.setattr(demo, "run_experiment", served)
    monkeypatch.setattr(demo, "picture", lambda lanes: drawn.extend(lanes) or "")
    # No record of a run that was valid: told so, and no success.
    assert demo.run(argparse.Namespace(simulate=False, seeds=1, output=tmp_path)) == 1
    for lane in drawn:
        assert lane.arrival_s.tolist() == [0.0, 1.0]
        assert lane.first_s.tolist() == [0.1, 1.2]
        assert lane.last_s.tolist() == [1.0, 4.0]
    assert [lane.is_ours for lane in drawn] == [False, True]


def test_without_a_valid_run_there_is_no_picture() -> None:
    assert picture([]) == ""


def test_lanes_share_one_scale() -> None:
    short, long = np.array([1.0]), np.array([10.0])
    page = picture([Lane("a", short * 0, short, short), Lane("b", long * 0, long, long)])
    assert "M0.0 1.5H100.0" in page  # a tenth of the width
    assert "M0.0 1.5H1000.0" in page


@pytest.mark.skipif(not BROWSER, reason="no chromium here")
def test_the_report_is_no_wider_than_a_phone_or_a_window(shown: Path, tmp_path: Path) -> None:
    found = measured(shown, (400, 1400), tmp_path)
    assert [one["found"] for one in found] == [[], []]
    assert all(one["shown"] for one in found)
