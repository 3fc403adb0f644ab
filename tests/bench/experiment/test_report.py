"""Runs as medians, ratios, tables, sentences and a page."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engines.server.server import ServerError
from bench.experiment.compare import report
from bench.experiment.goodput import figure, rate_within
from bench.experiment.goodput import rows as goodput_rows
from bench.experiment.plot import mean_against_tail
from bench.experiment.records import Record
from bench.experiment.report import write_report
from bench.experiment.stats import headline, ratio
from bench.experiment.table import as_experiment, plain, rows
from tests.bench.experiment.runs import on_server, record


def test_a_ratio_is_the_median_over_seeds_with_their_range() -> None:
    theirs = [record("fcfs", seed) for seed in range(3)]
    ours = [record("sage", seed, factor=f) for seed, f in enumerate((0.5, 0.9, 0.6))]
    assert str(ratio(ours, theirs, "duration")) == "0.60 (0.50 to 0.90)"
    assert str(ratio(ours[:1], theirs, "duration")) == "0.50"
    assert str(ratio(ours, theirs[2:], "duration")) == "0.60"  # one without its pair is left out
    assert ratio(ours, [], "duration") is None


def test_the_headline_compares_sage_with_the_first_and_the_best_of_the_others() -> None:
    factors = {"fcfs": 1.0, "sage": 0.5, "hrrn": 0.75}
    found = [record(policy, seed, factor=f) for policy, f in factors.items() for seed in range(5)]
    assert [part in headline(found) for part in ("`fcfs`", "50 % sooner", "`hrrn`")] == [True] * 3
    assert headline(found[:5]) == headline(found[5:]) == ""  # no sage, or it is the first


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
    page = html.unescape((tmp_path / "deep" / "report.html").read_text(encoding="utf-8"))
    assert (page.count("<svg"), page.count("<tr")) == (1, 1 + 3 * 2)
    assert not re.search(r'(src|href)="[^#]', page)
    for expected in (headline(valid), "0.60", "<two> cores", "2 answers of the wrong length"):
        assert expected in page
    head, body = rows(experiment, valid)
    assert [row[:2] for row in body] == [
        [rate, f"`{policy}`"] for rate in ("0.3x", "2x") for policy in ("fcfs", "hrrn", "sage")
    ]
    assert {len(row) for row in body} == {len(head)}
    assert len(plain(experiment, valid).splitlines()) == 2 + len(body)
    svg = mean_against_tail(valid)
    assert all(f">{policy}<" in svg for policy in ("fcfs", "hrrn", "sage"))


def test_a_comparison_without_a_valid_run_is_an_error(tmp_path: Path) -> None:
    found = [replace(on_server("fcfs", 0), problem="late")]
    with pytest.raises(ServerError, match="the first because: late"):
        report(as_experiment(found), found, tmp_path)


def swept(arm: str, rate: float, good: float, seed: int = 0) -> Record:
    return Record(
        experiment="load", load=f"chat, {rate}x", arm=arm, policy=arm, seed=seed, engine="sim",
        metrics={"offered_rate": rate, "good_share": good, "p99_ttft_ms": 100 * rate},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("good_shares", "rate"),
    [
        ((1.0, 1.0, 0.9), 2.5),  # half of the way from 2 to 3
        ((1.0, 0.9, 1.0), 1.5),  # the first miss counts
        ((0.9, 0.5, 0.1), 0.0),
        ((1.0, 1.0, 1.0), 3.0),
    ],
)
def test_the_rate_is_where_the_share_falls_below(good_shares: list[float], rate: float) -> None:
    points = [*enumerate(good_shares, 1)]
    assert rate_within(points, 0.95) == pytest.approx(rate)
    assert rate_within(points[::-1], 0.95) == pytest.approx(rate)


def test_ratios_are_paired_by_seed() -> None:
    found = [
        swept(arm, rate, good, seed)
        for seed, scale in ((0, 1.0), (1, 2.0))
        for arm, first in (("hrrn@clip=128", 1.0), ("fcfs", 0.5), ("sage", 2.0))
        for rate, good in ((first * scale, 1.0), (3 * first * scale, 0.9))
    ]
    head, body = goodput_rows(found)
    by_arm = {row[1]: dict(zip(head[2:5], row[2:5], strict=True)) for row in body}
    assert by_arm["`sage`"]["to tuned"] == "2.00 (2.00 to 2.00)"
    assert by_arm["`sage`"]["to fcfs"] == "4.00 (4.00 to 4.00)"
    assert figure(found, "chat", "sage/tuned", 0.95) == "2.00"
    assert figure(found, "chat", "fcfs", 0.95) == by_arm["`fcfs`"][head[2]]
