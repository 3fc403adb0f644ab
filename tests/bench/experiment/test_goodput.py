"""Requests per second within an SLO."""

from __future__ import annotations

import re

import pytest

from bench.experiment.goodput import figure, rate_within, rows
from bench.experiment.plot import against_load
from bench.experiment.records import Record


def record(arm: str, rate: float, good: float, seed: int = 0, mix: str = "chat") -> Record:
    return Record(
        experiment="load", load=f"{mix}, {rate}x", arm=arm, policy=arm, seed=seed, engine="sim",
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
        record(arm, rate, good, seed)
        for seed, scale in ((0, 1.0), (1, 2.0))
        for arm, first in (("hrrn@clip=128", 1.0), ("fcfs", 0.5), ("sage", 2.0))
        for rate, good in ((first * scale, 1.0), (3 * first * scale, 0.9))
    ]
    head, body = rows(found)
    by_arm = {row[1]: dict(zip(head[2:5], row[2:5], strict=True)) for row in body}
    assert by_arm["`sage`"]["to tuned"] == "2.00 (2.00 to 2.00)"
    assert by_arm["`sage`"]["to fcfs"] == "4.00 (4.00 to 4.00)"
    assert figure(found, "chat", "sage/tuned", 0.95) == "2.00"
    assert figure(found, "chat", "fcfs", 0.95) == by_arm["`fcfs`"][head[2]]


def test_a_sweep_has_two_panels_a_mix_and_a_line_an_arm() -> None:
    found = [
        record(arm, rate, 1.0, mix=mix)
        for mix, tuned in (("chat", "hrrn@clip=128"), ("code", "fcfs@clip=64"))
        for arm in (tuned, "fcfs", "sage")
        for rate in (0.5, 1.5)
    ]
    named = re.findall(r">([^<>]+)</text>", against_load(found))
    for name in ("chat", "code", "good requests", "SGLang, tuned", "fcfs", "sage"):
        assert named.count(name) == 1
