"""Runs as medians, ratios, tables, sentences and a page."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.engines.server.server import ServerError
from bench.experiment.compare import report
from bench.experiment.plot import colors, mean_against_tail
from bench.experiment.report import write_report
from bench.experiment.spec import Experiment, names
from bench.experiment.stats import against, headline, ratio
from bench.experiment.table import as_experiment, plain, rows
from tests.bench.experiment.runs import on_server, record

SEEDS = range(5)


class _Page(HTMLParser):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_ratio_is_the_median_over_seeds_with_their_range() -> None:
    theirs = [record("fcfs", seed) for seed in range(3)]
    ours = [record("sage", seed, factor=f) for seed, f in enumerate((0.5, 0.9, 0.6))]
    assert str(ratio(ours, theirs, "duration")) == "0.60 (0.50 to 0.90)"
    assert str(ratio(ours[:1], theirs, "duration")) == "0.50"
    assert str(ratio(ours, theirs[2:], "duration")) == "0.60"  # one without its pair is left out
    assert ratio(ours, [], "duration") is None


def test_the_headline_compares_sage_with_the_first_and_the_best_of_the_others() -> None:
    found = [record("fcfs", seed) for seed in SEEDS]
    assert headline(found) == ""
    found += [record("sage", seed, factor=0.5) for seed in SEEDS]
    sooner = "`sage` finished answers in 0.006 s on average, `fcfs` in 0.012 s: 50 % sooner."
    assert headline(found) == sooner
    found += [record("hrrn", seed, factor=0.75) for seed in SEEDS]
    assert headline(found) == f"{sooner} The best of the others was `hrrn`, in 0.009 s."
    assert headline(found[5:]) == ""  # sage is the first


@pytest.mark.parametrize(
    ("ours_s", "theirs_s", "said"),
    [
        (21.0, 28.5, "a finished answers in 21 s on average, b in 28 s: 26 % sooner"),
        (3.0, 2.0, "a finished answers in 3 s on average, b in 2 s: 50 % later"),
        (1.0, 1.001, "a finished answers in 1 s on average, b in 1 s: no sooner and no later"),
    ],
)
def test_a_person_would_say_so(ours_s: float, theirs_s: float, said: str) -> None:
    assert against("a", ours_s, "b", theirs_s) == said


def test_the_report_stands_alone_and_holds_everything(tmp_path: Path) -> None:
    found = [
        on_server(policy, seed, rate=rate, factor=factor)
        for policy, factor in (("fcfs", 1.0), ("hrrn", 0.9), ("sage", 0.6))
        for rate in ("0.3x", "2x")
        for seed in range(3)
    ]
    found[-1] = replace(found[-1], problem="2 answers of the wrong length")
    valid, experiment = found[:-1], as_experiment(found)
    write_report(experiment, found, tmp_path / "deep" / "report.html")
    page = _Page(tmp_path / "deep" / "report.html")
    assert page.tags.count("svg") == 1
    assert page.tags.count("tr") == 1 + 3 * 2
    assert all(link.startswith("#") for link in page.links)
    # It opens with the result, and names the device.
    places = [page.text.index(text) for text in (headline(valid), "device clock: h800", "rate")]
    assert places == sorted(places)
    for expected in ("0.60", "<two> cores", "2 answers of the wrong length"):
        assert expected in page.text
    head, body = rows(experiment, valid)
    assert [row[:2] for row in body] == [
        [rate, f"`{policy}`"] for rate in ("0.3x", "2x") for policy in ("fcfs", "hrrn", "sage")
    ]
    assert {len(row) for row in body} == {len(head)}
    assert len(plain(experiment, valid).splitlines()) == 2 + len(body)
    svg = mean_against_tail(valid)
    assert all(f">{policy}<" in svg for policy in ("fcfs", "hrrn", "sage"))
    assert svg == mean_against_tail(valid)


def test_the_table_comes_before_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("bench.experiment.compare.write_report", fails)
    found = [on_server(policy, 0) for policy in ("fcfs", "sage")]
    with pytest.raises(OSError, match="no room"):
        report(as_experiment(found), found, tmp_path)
    assert "mean TTLT, ratio" in capsys.readouterr().out
    with pytest.raises(ServerError, match="the first because: late"):
        report(as_experiment(found), [replace(found[0], problem="late")], tmp_path)


def test_no_two_arms_of_a_picture_are_of_one_colour() -> None:
    for name in names():
        arms = [arm.name for arm in Experiment.read(name).arms]
        assert len(set(colors(arms).values())) == len(arms), name
