"""Runs as medians, ratios, tables, sentences, pictures and a page."""

from __future__ import annotations

import argparse
import html
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench.experiment import demo
from bench.experiment.goodput import figure, metric_within, rate_within
from bench.experiment.goodput import rows as goodput_rows
from bench.experiment.lanes import Lane, picture, svg
from bench.experiment.plot import mean_against_tail
from bench.experiment.records import Provenance, Record
from bench.experiment.report import write_report
from bench.experiment.stats import headline, ratio
from bench.experiment.table import as_experiment, markdown, plain
from tests.bench.experiment.runs import on_server, record
from tests.bench.workloads.fingerprint import fingerprint

TABLE = """\
| load | by | policy | mean TTLT, ratio | mean TTLT, s | p99 ITL, ms |
| --- | --- | --- | --- | --- | --- |
| 0.3x | servers | `fcfs` | 1.96 (1.43 to 2.50) | 0.0105 | 10.5 |
| 0.3x | servers | `sage` | 1.00 | 0.00585 | 5.85 |
| 0.3x | simulated | `hrrn` | 1.00 | 1.23 | 1234 |
| 2x | servers | `sage` |  |  | 0 |

Made by `sage-sched bench run` (commit abc1234, 2 seeds); `sage-sched bench` ()."""


def test_a_table_has_medians_and_ratios_paired_by_seed() -> None:
    by = Provenance(commit="abc1234", command="sage-sched bench run")
    found = [
        *(replace(record("fcfs", seed, rate="0.3x"), made_by=by) for seed in (0, 1)),
        *(replace(record("sage", seed, rate="0.3x", factor=0.4 + 0.3 * seed), made_by=by)
          for seed in (0, 1)),
        replace(record("hrrn", 0, rate="0.3x", factor=123.44), engine="sim", made_by=by),
        replace(record("sage", 0), metrics={"p99_itl_ms": 0.0},
                made_by=Provenance(command="sage-sched bench")),
    ]  # fmt: skip
    about = {"ratios": ["mean_e2e_latency_ms"], "columns": ["mean_e2e_latency_ms", "p99_itl_ms"]}
    assert markdown(as_experiment(found, reference="sage", **about), found) == TABLE
    first = plain(as_experiment(found[:4], **about), found[:4]).splitlines()
    assert first == [
        "policy  mean TTLT, ratio     mean TTLT, s  p99 ITL, ms",
        "------------------------------------------------------",
        "`fcfs`  1.00                 0.0105        10.5",
        "`sage`  0.55 (0.40 to 0.70)  0.00585       5.85",
    ]
    three = [record("sage", seed, factor=f) for seed, f in enumerate((0.5, 0.9, 0.6))]
    theirs = [record("fcfs", seed) for seed in range(3)]
    assert str(ratio(three, theirs, "duration")) == "0.60 (0.50 to 0.90)"
    assert str(ratio(three, theirs[2:], "duration")) == "0.60"  # without its pair it is left out
    without = [replace(each, metrics={}) for each in theirs]
    assert ratio(three, [], "duration") is ratio(without, theirs, "duration") is None


@pytest.mark.parametrize(
    ("sage", "hrrn", "said"),
    [
        (550, 750, "6.6 s on average, `fcfs` in 12 s: 45 % sooner. The best of the others was "
         "`hrrn`, in 9 s."),
        (1500, 1200, "18 s on average, `fcfs` in 12 s: 50 % later."),
        (1001, 1200, "12 s on average, `fcfs` in 12 s: no sooner and no later."),
    ],
)  # fmt: skip
def test_the_headline_compares_sage_with_the_first_and_the_best_of_the_others(
    sage: float, hrrn: float, said: str
) -> None:
    factors = {"fcfs": 1000, "sage": sage, "hrrn": hrrn}
    found = [record(policy, seed, factor=f) for policy, f in factors.items() for seed in range(5)]
    idle = [record(policy, 0, rate="0.3x") for policy in factors]  # the last load counts
    assert headline([*idle, *found]) == f"`sage` finished answers in {said}"
    assert headline(found[:5]) == headline(found[5:]) == ""  # no sage, or it is the first


def test_the_report_stands_alone_and_holds_everything(tmp_path: Path) -> None:
    found = [
        on_server(policy, seed, rate=rate, factor=factor)
        for policy, factor in (("fcfs", 1.0), ("hrrn", 0.9), ("sage", 0.6))
        for rate in ("0.3x", "2x")
        for seed in range(3)
    ]
    found[0] = replace(found[0], metrics=found[0].metrics | {"p99_e2e_latency_ms": 99.0})
    found[-1] = replace(found[-1], problem="2 answers of the wrong length")
    write_report(as_experiment(found), found, tmp_path / "deep" / "report.html")
    page = html.unescape((tmp_path / "deep" / "report.html").read_text(encoding="utf-8"))
    counts = [page.count(part) for part in ("<svg", "<tr", 'class="ours"')]
    assert counts == [1, 1 + 3 * 2, 2]
    assert not re.search(r'(src|href)="[^#]', page)
    lost = "<li>sage, 2x, seed 2: 2 answers of the wrong length</li>"
    for expected in (headline(found[:-1]), "0.60", "<two> cores", lost):
        assert expected in page
    svg = mean_against_tail(found[:-1])
    assert all(f">{policy}<" in svg for policy in ("fcfs", "hrrn", "sage"))
    assert fingerprint(svg) == "00ca3094"


def test_lanes_show_when_requests_waited() -> None:
    """A tenth of a second is 10 of 1000; the second request comes first."""
    times = (np.array([2.0, 1.0]), np.array([2.5, 1.0]), np.array([11.0, 1.0]))
    html = picture([Lane("sage <ours>", *times, [[(3.0, 4.0)], []], is_ours=True)])
    assert re.findall(r'd="M(\S+) (\S+)H(\S+)" stroke="#(.)', html) == [
        ("0.0", "1.5", "0.0", "a"), ("0.0", "1.5", "1.0", "d"),
        ("100.0", "4.5", "150.0", "a"), ("150.0", "4.5", "1000.0", "d"),
        ("200.0", "4.5", "300.0", "a"),
    ]  # fmt: skip
    assert re.findall(r"<span>(.*?)</span>", html) == ["0 s", "2 s", "5 s", "8 s", "10 s"]
    assert "<h3>sage &lt;ours&gt;</h3>" in html
    assert picture([]) == ""


def test_lanes_stand_alone_as_a_file() -> None:
    times = (np.array([2.0, 1.0]), np.array([2.5, 1.0]), np.array([11.0, 1.0]))
    root = ElementTree.fromstring(svg([Lane("sage <ours>", *times, [[], []], is_ours=True)]))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["sage <ours>", "0 s", "2 s", "5 s", "8 s", "10 s"]


def swept(arm: str, rate: float, good: float, seed: int = 0) -> Record:
    return Record(
        experiment="load", load=f"chat, {rate}x", arm=arm, policy=arm, seed=seed, engine="sim",
        metrics={"offered_rate": rate, "good_share": good, "p99_ttft_ms": 100 * rate},
    )  # fmt: skip


def test_rates_within_the_slo_are_medians_with_ratios_paired_by_seed() -> None:
    found = [
        swept(arm, rate, good, seed)
        for seed, scale in ((0, 1.0), (1, 2.0))
        for arm, first in (("hrrn@clip=128", 1.0), ("fcfs", 0.5 * scale), ("sage", 2.0))
        for rate, good in ((first * scale, 1.0), (3 * first * scale, 0.9))
    ]
    misses = [(3, 1.0), (2, 0.9), (1, 1.0)]
    assert rate_within(misses, 0.95) == (pytest.approx(1.5), "")  # the first miss
    head, body = goodput_rows(found)
    assert head[2:5] == ["requests/s, 95% good", "to tuned", "to fcfs"]
    assert [row[:5] for row in body] == [
        ["chat", "`hrrn@clip=128`", "3.00", "1.00 (1.00 to 1.00)", "1.50 (1.00 to 2.00)"],
        ["chat", "`fcfs`", "2.50", "0.75 (0.50 to 1.00)", "1.00 (1.00 to 1.00)"],
        ["chat", "`sage`", "6.00", "2.00 (2.00 to 2.00)", "3.00 (2.00 to 4.00)"],
    ]
    arms = ("sage/tuned", "sage/fcfs", "fcfs", "tuned", "none")
    figures = [figure(found, "chat", arm, 0.95) for arm in arms]
    assert figures == ["2.00", "3.00", "2.50", "3.00", ""]
    at = [metric_within(found, "chat", arm, "p99_ttft_ms", 0.95) for arm in ("sage", "none")]
    assert at == pytest.approx([600.0, math.nan], nan_ok=True)


def test_rates_beyond_a_sweep_are_bounds() -> None:
    goods = {"hrrn@clip=128": (1.0, 0.9), "fcfs": (0.9, 0.8), "sage": (1.0, 1.0)}
    found = [swept(arm, 1 + 2 * i, of[i]) for arm, of in goods.items() for i in range(2)]
    arms = ("tuned", "fcfs", "sage", "sage/tuned", "sage/fcfs", "fcfs/sage", "tuned/sage")
    figures = [figure(found, "chat", arm, 0.95) for arm in arms]
    assert figures == ["2.00", "< 1.00", "≥ 3.00", "≥ 1.50", "≥ 3.00", "≤ 0.33", "≤ 0.67"]
    two = [*found, *(swept("none", rate, 0.0) for rate in (1, 3))]
    assert figure(two, "chat", "fcfs/none", 0.95) == ""


@pytest.mark.slow
def test_the_report_opens_with_the_result_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(argparse.Namespace(simulate=True, seeds=1, output=tmp_path)) == 0
    text = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    places = [text.index(part) for part in ("sage finished answers", 'class="lanes"', "<table>")]
    assert places == sorted(places)
    assert re.findall("<h3>(.*?): requests waited (.*?) s on", text) == [
        ("shortest-prefill-first@clip=32", "8"), ("sage", "3")
    ]  # fmt: skip
    assert fingerprint(re.findall(r'path d="(.*?)"', text)) == "374131af"
    assert "src=" not in text
    assert "href=" not in text
    *_, limit, _, said, _ = capsys.readouterr().out.splitlines()
    assert limit.startswith("If no request waits, no order can help: below 1.7 requests/s")
    assert said == (
        "Simulated: sage finished answers in 14 s on average, SGLang's best tuned policy "
        "(shortest-prefill-first@clip=32) in 19 s: 23 % sooner. Of 100 requests 99 were good under "
        "sage, and 73 under SGLang's: the first token within 2 s, and then at most 100 ms per "
        "token."
    )
