"""Damaged and odd logs are read right, or the error is named."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
from pathlib import Path

import pytest

from bench.whatif.log import TrafficLog
from bench.whatif.read import read_log
from predictor_store.data.observations import Observations
from predictor_store.logs.reader import ReadOptions
from sage_sched.errors import UserError
from tests.predictor_store.logs.variants import VARIANTS, made

ASKED = made(240)
SPAN_S = ASKED[-1].at_s
TABLE, AZURE, JSON = (
    VARIANTS[name].write(ASKED) for name in ("Vidur", "Azure, 2024", "messages with usage")
)
LINES = JSON.splitlines(keepends=True)


def columns(text: str, order: list[int], head: bool = True) -> str:
    """A table with its columns in another order; the head too, unless it is left as it is."""
    first, *rows = csv.reader(io.StringIO(text))
    moved = [[row[i] for i in order] for row in rows]
    out = io.StringIO()
    csv.writer(out).writerows([[first[i] for i in order] if head else first, *moved])
    return out.getvalue()


def shuffled(text: str) -> str:
    first, *rows = text.splitlines(keepends=True)
    random.Random(1).shuffle(rows)
    return first + "".join(rows)


def zones(text: str, *named: str) -> str:
    """The zones of a table's dates, in turn."""
    rows = text.split("+00:00")
    marks = [named[i % len(named)] for i in range(len(rows) - 1)]
    return "".join(row + mark for row, mark in zip(rows, [*marks, ""], strict=True))


def times(factor: float, digits: int | None = 0) -> str:
    """A table of times in another unit, without its name."""
    rows = [
        f"{round(a.at_s * factor, digits) if digits else round(a.at_s * factor)},3,{a.outputs}"
        for a in ASKED
    ]
    return "\n".join(["timestamp,input_tokens,output_tokens", *rows])


def packed(text: str, lost: int) -> bytes:
    return gzip.compress(text.encode())[: -lost or None]


# Logs that are read right, with the least number of rows.
SOUND: dict[str, tuple[str | bytes, int]] = {
    "columns in another order": (columns(TABLE, [2, 0, 1]), 240),
    "columns in another order, dates": (columns(AZURE, [1, 2, 0]), 240),
    "rows newest first": (TABLE[: TABLE.index("\n") + 1] + "".join(
        reversed(TABLE.splitlines(keepends=True)[1:])), 240),
    "a bad row in ten thousand": ("".join(LINES[:100]) + "{oops\n" + "".join(LINES[100:]), 240),
    "a bad first row": ("{oops\n" + JSON, 240),
    "a bad last row": (JSON + LINES[5][:30], 240),
    "a row of no UTF-8": (JSON.encode() + b"\xff\xfe\xff\n", 240),
    "a row of numbers": (JSON + "[1, 2]\n7\nnull\n", 240),
    "a row that is deep": (JSON + '{"a":' * 50_000 + "\n", 240),
    "a null time": (JSON + json.dumps(json.loads(LINES[3]) | {"timestamp": None}) + "\n", 240),
    "a time that is a word": (TABLE + "soon,3,5\n", 240),
    "a time that is no number": (TABLE + "nan,3,5\ninf,3,5\n", 240),
    "a length that is none": (TABLE + "1,3,many\n2,-3,5\n3,1.5,2\n4,3,0\n", 240),
    "too many columns": (TABLE + "1,2,3,4\n", 240),
    "too few columns": (TABLE + "1,2\n", 240),
    "a quote that never ends": (TABLE + '"1,2,3\n', 240),
    "the head again": (TABLE + TABLE[: TABLE.index("\n") + 1], 240),
    "dates in two zones": (
        "".join(JSON.replace("Z", "+00:00")), 240),
    "truncated gzip": (packed(JSON, 300), 100),
    "an array that breaks off": ("[" + ",\n".join(LINES[:200]) + ", {", 200),
    "an array with a bad row last": ("[" + ",\n".join(LINES) + ", {oops}]", 240),
    "milliseconds": (times(1e3), 240),
    "microseconds": (times(1e6), 240),
    "nanoseconds": (times(1e9), 240),
    "milliseconds with fractions": (times(1e3, 3), 240),
    "seconds with fractions": (times(1.0, 3), 240),
    "two zones, each with its name": (zones(AZURE, "+00:00", "Z"), 240),
}  # fmt: skip
# Logs that a user has to judge, with the caution.
DOUBTFUL: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "is empty"),
    "only a mark of byte order": ("\ufeff", "is empty"),
    "only a head": (TABLE[: TABLE.index("\n") + 1], "is empty"),
    "empty gzip": (gzip.compress(b""), "is empty"),
    "gzip of nothing but its head": (gzip.compress(JSON.encode())[:12], "breaks off"),
    "zeros": (b"\0" * 5000, "neither text"),
    "a head of other columns": (columns(AZURE, [1, 2, 0], head=False), "a time that cannot|malf"),
    "a head that is missing": (AZURE[AZURE.index("\n") + 1 :], "no known format"),
    "lengths for times": (columns(TABLE, [1, 0, 2], head=False), "malformed number of tokens"),
    "some dates without a zone": (zones(AZURE, "+00:00", ""), "CAUTION: .*--tz"),
    "all at once": ("t,input,output\n" + "5,3,5\n" * 50, "CAUTION: .*arrive at once"),
    "answers at their cap": (
        "t,input,output\n" + "".join(f"{i},3,512\n" for i in range(50)), "CAUTION: .*512 tokens"),
    "answers that were cut": (
        "t,input,output,finish_reason\n" + "".join(f"{i},3,{i + 1},length\n" for i in range(50)),
        "CAUTION: 50 of 50 answers are cut"),
    "in no order": (shuffled(TABLE), "CAUTION: .*no order of arrival"),
    "a time far away": (TABLE + "900000,3,5\n", "CAUTION: .*far from the others"),
    "hours of nothing": (
        "t_s,input,output\n" + "".join(f"{i * 300},3,{i + 1}\n" for i in range(50)),
        "CAUTION: .*--time-unit"),
    "half of the times of another kind": (
        TABLE + "".join(f"2026-09-21T00:00:{i:02d}Z,3,5\n" for i in range(50)), "of another kind"),
}  # fmt: skip


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "log"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder: Path, content: str | bytes) -> TrafficLog:
    return read_log([written(folder, content)])


@pytest.mark.parametrize("name", SOUND)
def test_it_is_read_right_but_for_the_rows_that_are_not(tmp_path: Path, name: str) -> None:
    content, least = SOUND[name]
    log = read(tmp_path, content)
    assert least <= len(log.requests) <= 240
    said = "\n".join(log.lines)
    if len(log.requests) == 240:
        assert log.arrivals_s == pytest.approx(SPAN_S, abs=1e-3)
    else:
        assert "breaks off" in said
    assert "CAUTION" not in said or "guess" in said or "order" in said


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_is_doubtful_is_said(tmp_path: Path, name: str) -> None:
    content, said = DOUBTFUL[name]
    try:
        found = "\n".join(read(tmp_path, content).lines)
    except UserError as error:
        found = str(error)
    assert re.search(said, found), found


@pytest.mark.parametrize("name", [*SOUND, *DOUBTFUL])
def test_a_store_is_warmed_from_it_or_the_user_is_told(tmp_path: Path, name: str) -> None:
    content, _ = (SOUND | DOUBTFUL)[name]  # type: ignore[operator]
    try:
        found = list(Observations([str(written(tmp_path, content))]))
    except UserError:
        return
    assert {each.output_tokens for each in found} <= {a.outputs for a in ASKED}


@pytest.mark.parametrize(
    ("options", "span_s"),
    [
        (ReadOptions(time_unit="s"), SPAN_S * 1e3),
        (ReadOptions(time_unit="ms"), SPAN_S),
        (ReadOptions(time_unit="us"), SPAN_S / 1e3),
    ],
)
def test_a_unit_that_is_named_holds(tmp_path: Path, options: ReadOptions, span_s: float) -> None:
    log = read_log([written(tmp_path, times(1e3))], options=options)
    assert log.arrivals_s == pytest.approx(span_s, rel=1e-3)
    assert "as --time-unit says" in "\n".join(log.lines)
