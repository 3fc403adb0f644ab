"""Damaged and odd logs are read right, or the error is named."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from bench.whatif.log import TrafficLog
from bench.whatif.read import read_log
from sage_sched.errors import UserError
from tests.predictor_store.logs.variants import VARIANTS, date, made

ASKED = made(240)
SPAN_S = ASKED[-1].at_s
TABLE, JSON = (VARIANTS[name].write(ASKED) for name in ("Vidur", "messages with usage"))
LINES, (HEAD, *ROWS) = JSON.splitlines(keepends=True), TABLE.splitlines(keepends=True)


def times(factor: float, digits: int | None = None) -> str:
    """A table of times in another unit, without its name."""
    rows = [f"{round(a.at_s * factor, digits)},3,{a.outputs}\n" for a in ASKED]
    return "".join(["timestamp,input_tokens,output_tokens\n", *rows])


def dates(*zones: str, head: str = "t,input,output\n") -> str:
    """A table of dates whose zones change."""
    rows = [f"{date(a.start_s, zones[a.number % len(zones)])},3,{a.outputs}\n" for a in ASKED]
    return "".join([head, *rows])


def alike(head: str, row: str) -> str:
    return f"{head}\n" + "".join(f"{row.format(i, 300 * i)}\n" for i in range(50))


# All 240 requests are read, at their times.
SOUND: dict[str, str | bytes] = {
    "columns in another order": "".join(
        ",".join(line.rstrip().split(",")[::-1]) + "\n" for line in (HEAD, *ROWS)
    ),
    "rows newest first": "".join([HEAD, *reversed(ROWS)]),
    "bad rows": "".join(["{oops\n", *LINES[:100], "{oops\n", *LINES[100:], LINES[5][:30]]),
    "rows that are no objects": JSON + "[1, 2]\n7\nnull\n" + '{"a":' * 50_000 + "\n",
    "a null time": JSON + json.dumps(json.loads(LINES[3]) | {"timestamp": None}) + "\n",
    "values that are none": TABLE + "soon,3,5\nnan,3,5\ninf,3,5\n1,3,many\n2,-3,5\n4,3,0\n",
    "other numbers of columns": TABLE + "1,2,3,4\n1,2\n",
    "the head again": TABLE + HEAD,
    "milliseconds": times(1e3),
    "microseconds": times(1e6),
    "milliseconds with fractions": times(1e3, 3),
    "two zones, each with its name": dates("+00:00", "Z"),
    "sessions in no order": "".join(
        json.dumps({"t_s": a.at_s, "input": 3, "output": a.outputs, "session": str(a.number)})
        + "\n"
        for a in random.Random(1).sample(ASKED, 240)
    ),
}
# Logs that a user has to judge, with the caution.
DOUBTFUL: dict[str, tuple[str | bytes, str]] = {
    "only a mark of byte order": ("\ufeff", "is empty"),
    "only a head": (HEAD, "is empty"),
    "empty gzip": (gzip.compress(b""), "is empty"),
    "a head of other columns": (
        dates("Z", head="input_tokens,t,output_tokens\n"), "malformed number of tokens"),
    "a head that is missing": (dates("Z", head=""), "no known form"),
    "some dates without a zone": (dates("+00:00", ""), "CAUTION: .*--tz"),
    "all at once": (alike("t,input,output", "5,3,5"), "CAUTION: .*arrive at once"),
    "answers at their cap": (alike("t,input,output", "{},3,512"), "CAUTION: .*512 tokens"),
    "answers that were cut": (
        alike("t,input,output,finish_reason", "{0},3,{0}1,length"), "50 of 50 answers are cut"),
    "in no order": (
        "".join([HEAD, *random.Random(1).sample(ROWS, 240)]), "CAUTION: .*not in order of arrival"),
    "a time far away": (TABLE + "900000,3,5\n", "CAUTION: .*far from the others"),
    "hours of nothing": (alike("t_s,input,output", "{1},3,{0}1"), "CAUTION: .*--time-unit"),
    "half of the times of another kind": (
        TABLE + "".join(f"2026-09-21T00:00:{i:02d}Z,3,5\n" for i in range(50)), "of another kind"),
}  # fmt: skip


def read(folder: Path, content: str | bytes) -> TrafficLog:
    path = folder / "log"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_log([path])


@pytest.mark.parametrize("name", SOUND)
def test_it_is_read_right_but_for_the_rows_that_are_not(tmp_path: Path, name: str) -> None:
    log = read(tmp_path, SOUND[name])
    assert (len(log.requests), log.last_arrival_s) == (240, pytest.approx(SPAN_S, abs=1e-3))
    said = "\n".join(log.lines)
    assert "CAUTION" not in said or "guess" in said or "rows newest first" in name


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_is_doubtful_is_said(tmp_path: Path, name: str) -> None:
    content, said = DOUBTFUL[name]
    try:
        found = "\n".join(read(tmp_path, content).lines)
    except UserError as error:
        found = str(error)
    assert re.search(said, found), found
