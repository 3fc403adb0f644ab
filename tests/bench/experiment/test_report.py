from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.experiment.compare import as_experiment, compare_and_report
from bench.experiment.plot import colors, mean_against_tail
from bench.experiment.report import write_report
from bench.experiment.spec import Experiment, names
from bench.experiment.stats import summarize
from tests.bench.experiment.runs import recorded, run


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_stands_alone_and_holds_everything(tmp_path: Path) -> None:
    runs = [
        run(policy, seed, rate=rate, factor=factor)
        for policy, factor in (("fcfs", 1.0), ("hrrn", 0.9), ("sage", 0.6))
        for rate in ("0.3x", "2x")
        for seed in range(3)
    ]
    for made in runs:
        made["settings"] = {"device clock": "h800-qwen3-32b", "speed": 2.0, "cpu": "<two> cores"}
    runs[-1] |= {"valid": False, "invalid_reason": "2 answers of the wrong length"}
    records = recorded(runs)
    write_report(as_experiment(records), runs, records, tmp_path / "deep" / "report.html")
    page = _Page()
    page.feed((tmp_path / "deep" / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 1
    assert page.tags.count("tr") == 1 + 3 * 2
    assert all(link.startswith("#") for link in page.links)
    # It opens with the result, and says on what it was had.
    result = "Under sage the mean time to the last token was 0.60 of what it was under fcfs"
    places = [page.text.index(text) for text in (result, "device clock: h800", "rate")]
    assert places == sorted(places)
    assert "and 0.67 of what it was under hrrn, the best of the others." in page.text
    for expected in ("0.60", "<two> cores", "2 answers of the wrong length"):
        assert expected in page.text


def test_the_table_comes_before_the_report_and_json_in_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run(policy, 0, rate="2x") for policy in ("fcfs", "sage")]
    for made in runs:
        made["settings"] = {}
    monkeypatch.setattr("bench.experiment.compare.compare_policies", lambda settings: iter(runs))
    servers = SimpleNamespace(folder=tmp_path)
    settings: Any = SimpleNamespace(servers=servers, num_seeds=1, policies=("fcfs", "sage"))
    assert compare_and_report(settings, None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == summarize(recorded(runs))
    assert (tmp_path / "report.html").exists()

    def fails(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("bench.experiment.report.write_report", fails)
    with pytest.raises(OSError, match="no room"):
        compare_and_report(settings, None)
    assert "mean, ratio" in capsys.readouterr().out


def test_no_two_arms_of_a_picture_are_of_one_colour() -> None:
    for name in names():
        arms = [arm.name for arm in Experiment.read(name).arms]
        assert len(set(colors(arms).values())) == len(arms), name


def test_a_picture_has_a_mark_for_each_arm() -> None:
    found = recorded([run(policy, seed) for policy in ("fcfs", "sage") for seed in range(3)])
    svg = mean_against_tail(found)
    assert ">fcfs<" in svg
    assert ">sage<" in svg
    assert svg == mean_against_tail(found)
