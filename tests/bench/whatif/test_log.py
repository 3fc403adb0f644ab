"""Damaged and odd logs are read right, or refused by name. Sessions are linked."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulator.presets import PRESETS
from bench.simulator.request import SimRequest
from bench.simulator.result import alone_s
from bench.whatif.log import Logged, TrafficLog
from bench.whatif.read import read_log
from bench.whatif.sessions import Link, sessions_of
from bench.whatif.simulation import requests_of
from sage_sched.errors import UserError
from tests.predictor_store.logs.variants import VARIANTS, date, made

ASKED = made(240)
SPAN_S = ASKED[-1].at_s
TABLE, JSON = (VARIANTS[name].write(ASKED) for name in ("Vidur", "messages with usage"))
LINES, (HEAD, *ROWS) = JSON.splitlines(keepends=True), TABLE.splitlines(keepends=True)
NO_TIME = json.dumps(json.loads(LINES[3]) | {"timestamp": None})
NO_VALUES = "soon,3,5\nnan,3,5\ninf,3,5\n1,3,many\n2,-3,5\n4,3,0\n1,2,3,4\n1,2\n"


def dates(*zones: str, head: str = "t,input,output\n") -> str:
    """A table of dates whose zones change."""
    rows = [f"{date(a.start_s, zones[a.number % len(zones)])},3,{a.outputs}\n" for a in ASKED]
    return "".join([head, *rows])


def alike(head: str, row: str) -> str:
    return f"{head}\n" + "".join(f"{row.format(i)}\n" for i in range(50))


# All 240 requests are read, at their times.
SOUND = {
    "columns in another order, rows newest first": "".join(
        ",".join(line.rstrip().split(",")[::-1]) + "\n" for line in (HEAD, *reversed(ROWS))
    ),
    "bad rows": "".join(["{oops\n", *LINES[:100], "{oops\n", *LINES[100:], LINES[5][:30]]),
    "rows that are no requests": "\n".join(
        [JSON, NO_TIME, "[1, 2]", "7", "null", '{"a":' * 50_000]
    ),
    "values that are none": TABLE + HEAD + NO_VALUES,
    "two zones, each with its name": dates("+00:00", "Z"),
    "sessions in no order": "".join(
        json.dumps({"t_s": a.at_s, "input": 3, "output": a.outputs, "session": str(a.number)})
        + "\n"
        for a in random.Random(1).sample(ASKED, 240)
    ),
}
# Logs that a user has to judge, each with its caution.
DOUBTFUL = {
    "only a mark of byte order": ("\ufeff", "is empty"),
    "only a head": (HEAD, "is empty"),
    "a head of other columns": (
        dates("Z", head="input_tokens,t,output_tokens\n"), "malformed number of tokens"),
    "a head that is missing": (dates("Z", head=""), "no known form"),
    "some dates without a zone": (dates("+00:00", ""), "CAUTION: .*--tz"),
    "answers at their cap": (alike("t,input,output", "{},3,512"), "CAUTION: .*512 tokens"),
    "answers that were cut": (
        alike("t,input,output,finish_reason", "{0},3,{0}1,length"), "50 of 50 answers are cut"),
    "in no order": (
        "".join([HEAD, *random.Random(1).sample(ROWS, 240)]), "CAUTION: .*not in order of arrival"),
    "half of the times of another kind": (
        TABLE + "".join(f"2026-09-21T00:00:{i:02d}Z,3,5\n" for i in range(50)), "of another kind"),
}  # fmt: skip


def read(folder: Path, text: str) -> TrafficLog:
    (folder / "log").write_text(text, encoding="utf-8")
    return read_log([folder / "log"])


@pytest.mark.parametrize("name", SOUND)
def test_it_is_read_right_but_for_the_rows_that_are_not(tmp_path: Path, name: str) -> None:
    log = read(tmp_path, SOUND[name])
    assert (len(log.requests), log.last_arrival_s) == (240, pytest.approx(SPAN_S, abs=1e-3))
    said = "\n".join(log.lines)
    assert "CAUTION" not in said or "guess" in said or "rows newest first" in name


@pytest.mark.parametrize("name", DOUBTFUL)
def test_doubts_are_reported(tmp_path: Path, name: str) -> None:
    text, said = DOUBTFUL[name]
    try:
        found = "\n".join(read(tmp_path, text).lines)
    except UserError as error:
        found = str(error)
    assert re.search(said, found), found


ENGINE = PRESETS["h800-qwen3-32b"]
FIRST = Logged(0.0, 300, 50, 64, ttlt_s=2.0, session="s")


def linked(*requests: Logged) -> list[tuple[int | None, float]]:
    links = sessions_of(ENGINE, requests).links
    return [(link.follows, round(link.pause_s, 9)) for link in links]


def test_a_request_follows_the_one_before_in_its_session_unless_the_session_overlaps() -> None:
    """An overlap below the precision of the log's times (seconds in the last case) does not
    count."""
    other = replace(FIRST, session="t")
    later, last = (replace(FIRST, arrival_s=at_s) for at_s in (5.5, 8.0))
    assert linked(FIRST, other, later, last) == [(None, 0.0)] * 2 + [(0, 3.5), (2, 0.5)]
    too_soon = replace(FIRST, arrival_s=7.0)
    assert linked(FIRST, other, later, too_soon, last) == [(None, 0.0)] * 5
    assert linked(FIRST, replace(FIRST, arrival_s=1.0)) == [(None, 0.0), (0, 0.0)]


def test_one_session_of_a_load_test_is_no_conversation() -> None:
    """Requests under one trace come at the log's times, whether or not ends are recorded."""
    for ttlt_s in (2.0, None):
        requests = [replace(FIRST, arrival_s=a.at_s, ttlt_s=ttlt_s) for a in ASKED]
        found = sessions_of(ENGINE, requests)
        assert (found.links, found.num_supposed, found.num_beside) == ([Link()] * 240, 0, 240)


def test_where_no_end_is_recorded_the_pause_is_less_the_time_alone() -> None:
    first = replace(FIRST, ttlt_s=None)
    second, third = replace(first, arrival_s=9.5), replace(first, arrival_s=20.0)
    alone = alone_s(ENGINE, first.input_tokens, first.output_tokens)
    assert linked(first, second, third) == [
        (None, 0.0), (0, pytest.approx(9.5 - alone)), (1, pytest.approx(10.5 - alone)),
    ]  # fmt: skip


def test_a_parent_and_a_recorded_pause_hold() -> None:
    first = replace(FIRST, session="", id="a")
    child = replace(first, arrival_s=3.5, id="b", parent="a")
    orphan = replace(first, arrival_s=4.0, id="c", parent="gone")
    beside = replace(first, arrival_s=4.5, id="d", parent="b")  # its parent still ran
    links = [(None, 0.0), (0, 1.5), (None, 0.0), (None, 0.0)]
    assert linked(first, child, orphan, beside) == links
    assert sessions_of(ENGINE, [first, child, orphan]).num_supposed == 0
    assert linked(FIRST, replace(FIRST, arrival_s=1.0, pause_s=4.0)) == [(None, 0.0), (0, 4.0)]


def test_requests_for_the_simulator_have_caps_that_fit() -> None:
    """No cap is shorter than the answer."""
    most = ENGINE.kv_pool_tokens - ENGINE.page_size - 300 - 1
    for cap_tokens, given, cap in (
        (64, None, 64), (40, 99, 50), (None, 99, 99), (0, 99, most), (None, None, most),
        (most + 9, None, most),
    ):  # fmt: skip
        logged = replace(FIRST, cap_tokens=cap_tokens)
        found = requests_of(ENGINE, [logged, logged], [Link(), Link(0, 3.0)], given)
        first = SimRequest(0.0, 300, 50, cap, None, "log")
        assert found == [first, replace(first, follows=0, pause_s=3.0)]
