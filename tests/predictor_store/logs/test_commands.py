from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, timedelta

import pytest

from predictor_store.logs.clock import Clock
from predictor_store.logs.options import add_options, read_options
from predictor_store.logs.reader import ReadOptions
from predictor_store.logs.registry import FORMATS
from predictor_store.logs.summary import cautions_of_lengths, cautions_of_times
from sage_sched.cli import main


def test_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{each.name}: " in shown and each.example in shown for each in FORMATS)
    assert main(["formats", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [each.name for each in FORMATS]


def parsed(*words: str) -> ReadOptions:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_options(parser.parse_args(words))


UTC_2026 = datetime(2026, 9, 21, 14, tzinfo=UTC)


@pytest.mark.parametrize(("zone", "hours"), [("+02:00", 2), ("-0530", -5.5), ("Europe/Berlin", 2)])
def test_dates_without_a_zone_are_in_the_one_that_is_named(zone: str, hours: float) -> None:
    clock = Clock(zone=parsed("--tz", zone).zone)
    assert clock.read("2026-09-21 14:00:00") == (UTC_2026 - timedelta(hours=hours)).timestamp()
    for text in ("2026-09-21T14:00:00Z", "2026/09/21 14:00:00,0 GMT", "2026-09-21 14:00 UTC"):
        assert clock.read(text) == UTC_2026.timestamp()
    assert not clock.cautions()
    unsure = Clock()
    for text, num_doubts in (("2026-09-21 14:00:00", 0), ("2026-09-21T14:00:00Z", 1)):
        assert unsure.read(text) == UTC_2026.timestamp()
        assert len(unsure.cautions()) == num_doubts


@pytest.mark.parametrize(
    "words", [["--tz", "Nowhere/Here"], ["--tz", "+99"], ["--format", "x"], ["--time-unit", "h"]]
)
def test_options_that_mean_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*words)


@pytest.mark.parametrize(
    ("numbers", "usual", "unit", "is_sure"),
    [
        ([1_790_000_000 + i for i in range(30)], "", "s", True),
        ([1_790_000_000_000 + i for i in range(30)], "", "ms", True),
        ([i * 250 for i in range(30)], "", "ms", False),
        ([i * 250 for i in range(30)], "ms", "ms", True),
        ([i * 0.25 for i in range(30)], "", "s", True),
        ([i / 4 for i in range(30)], "ms", "s", False),
        ([*range(30)], "ms", "s", False),
        ([i * 3 for i in range(30)], "ms", "ms", False),
        ([i * 2.3 for i in range(30)], "ms", "s", False),
        ([i * 250_000 for i in range(30)], "", "us", False),
        ([i * 3 for i in range(30)], "", "s", False),
        ([0, 4, 9], "", "s", True),
        ([0, 40, 90], "ms", "ms", True),
        ([0, 400, 900], "", "s", False),
        ([5] * 30, "ms", "ms", True),
        ([i * 250 for i in range(20)], "", "ms", False),
        ([*range(0, 50_000, 250), 10**8], "", "ms", False),
        ([i * 50.3 for i in range(30)], "", "s", True),
        ([i * 1000.3 for i in range(30)], "", "ms", False),
    ],
)
def test_units_are_found_or_guessed(
    numbers: list[float], usual: str, unit: str, is_sure: bool
) -> None:
    clock = Clock()
    assert [clock.read(number, usual=usual) for number in numbers] == numbers
    assert (clock.guess()[0], not clock.cautions()) == (unit, is_sure)
    assert Clock("ms").read(5000, unit) == 5.0  # the command uses the named unit in any case


@pytest.mark.parametrize(
    ("lengths", "num_cut", "said"),
    [
        ([5] * 20, 0, ["20 of 20 answers have 5 tokens"]),
        ([*range(20)], 18, ["18 of 20 answers are cut"]),
        ([*range(20)], 17, []),
        ([5] * 19, 19, []),
    ],
)
def test_logs_of_cut_answers_are_doubted(lengths: list[int], num_cut: int, said: list[str]) -> None:
    found = cautions_of_lengths(lengths, num_cut)
    assert [one[: len(start)] for one, start in zip(found, said, strict=True)] == said


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([5] * 20, ["all requests arrive at once"]),
        ([i * 150 for i in range(30)], ["30 requests in 4.35e+03 s"]),
        ([i * 150 for i in range(20)], []),  # not an hour
        ([i / 2000 for i in range(30)], ["30 requests in 0.0145 s"]),
        ([i / 2000 for i in range(19)], []),
        ([*range(200), 9000], []),
        ([*range(200), 90_000], ["201 requests", "some times lie far"]),
        ([*range(29, -1, -1)], []),  # newest first
        ([i * 7 % 30 for i in range(30)], ["its rows are not in order"]),
    ],
)
def test_odd_times_are_doubted(times: list[float], said: list[str]) -> None:
    found = cautions_of_times(times, is_ordered=True)
    assert [one[: len(start)] for one, start in zip(found, said, strict=True)] == said
    assert cautions_of_times(times, is_ordered=False) == [of for of in found if "order" not in of]
