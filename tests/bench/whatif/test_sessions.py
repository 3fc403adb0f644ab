"""Requests that come after another's answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulator.presets import PRESETS
from bench.simulator.request import SimRequest
from bench.simulator.result import alone_s
from bench.whatif.log import Logged
from bench.whatif.sessions import Link, links_of
from bench.whatif.simulation import requests_of

ENGINE = PRESETS["h800-qwen3-32b"]
FIRST = Logged(0.0, 300, 50, 64, ttlt_s=2.0, session="s")


def linked(*requests: Logged) -> list[tuple[int | None, float]]:
    return [(link.follows, round(link.pause_s, 9)) for link in links_of(ENGINE, requests)]


def test_a_request_follows_the_last_of_its_session_that_had_ended() -> None:
    other = replace(FIRST, session="t")
    too_soon, later, beside, last = (replace(FIRST, arrival_s=at_s) for at_s in (1.0, 5, 6, 7.5))
    found = linked(FIRST, other, too_soon, later, beside, last)
    assert found == [(None, 0.0)] * 3 + [(2, 2.0), (2, 3.0), (3, 0.5)]


def test_where_no_end_is_recorded_the_pause_is_less_the_time_alone() -> None:
    first = replace(FIRST, ttlt_s=None)
    second, third = replace(first, arrival_s=9.0), replace(first, arrival_s=9.1)
    alone = alone_s(ENGINE, first.input_tokens, first.output_tokens)
    assert linked(first, second, third) == [
        (None, 0.0), (0, pytest.approx(9.0 - alone)), (1, 0.0),
    ]  # fmt: skip


def test_a_parent_and_a_recorded_pause_hold() -> None:
    first = replace(FIRST, session="", id="a")
    child = replace(first, arrival_s=1.0, id="b", parent="a")
    orphan = replace(first, arrival_s=2.0, id="c", parent="gone")
    assert linked(first, child, orphan) == [(None, 0.0), (0, 0.0), (None, 0.0)]
    assert linked(FIRST, replace(FIRST, arrival_s=1.0, pause_s=4.0)) == [(None, 0.0), (0, 4.0)]


def test_requests_for_the_simulator_have_caps_that_fit() -> None:
    """No cap is below the answer."""
    most = ENGINE.kv_pool_tokens - ENGINE.page_size - 300 - 1
    for cap_tokens, given, cap in (
        (64, None, 64), (40, 99, 50), (None, 99, 99), (0, 99, most), (None, None, most),
        (most + 9, None, most),
    ):  # fmt: skip
        logged = replace(FIRST, cap_tokens=cap_tokens)
        found = requests_of(ENGINE, [logged, logged], [Link(), Link(0, 3.0)], given)
        first = SimRequest(0.0, 300, 50, cap, None, "log")
        assert found == [first, replace(first, follows=0, pause_s=3.0)]
