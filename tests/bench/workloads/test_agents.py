"""Recorded sessions as requests that follow one another."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.request import SimRequest
from bench.workloads.agents import (
    Session,
    Step,
    factor_for,
    held_out,
    known_lengths,
    read_sessions,
    requests_of,
    with_said_pauses,
)
from bench.workloads.prompts import WorkloadError

STEPS = (
    Step(0.0, 1000, 100, None, 0),
    Step(60.0, 1500, 40, 0, 960),
    Step(61.0, 1800, 20, 1, 1472),
    Step(5000.0, 1700, 20, 0, 640),
)
SESSION = Session("one", STEPS)


def asked(number: int) -> list[SimRequest]:
    """Return the session a number of times, of half its tokens."""
    return requests_of(
        [SESSION] * number, [3.0] * number,
        factor=2.0, engine=H800_QWEN3_32B, prediction=None, max_pause_s=100.0,
    )  # fmt: skip


def test_steps_follow_each_other_and_share_prefixes() -> None:
    requests = asked(2)
    lengths = [(each.input_tokens, each.output_tokens) for each in requests[:4]]
    assert lengths == [(500, 50), (750, 20), (900, 10), (850, 10)]
    assert [request.follows for request in requests] == [None, 0, 1, 2, None, 4, 5, 6]
    assert [request.arrival_s for request in requests[::4]] == [3.0, 3.0]
    assert [request.spans for request in requests[1:5]] == [
        ((0, 0, 480), (1, 0, 270)),
        ((0, 0, 480), (1, 0, 256), (2, 0, 164)),
        ((0, 0, 320), (3, 0, 530)),
        ((4, 0, 500),),  # two runs of one recording are two sessions: they share nothing
    ]
    assert {request.hints.session for request in requests[:4]} == {"0 one"}
    # A pause leaves out the engine's own time.
    assert 55 < requests[1].pause_s < 60
    assert requests[2].pause_s < 1.0
    assert requests[3].pause_s == 100.0


def test_clients_tell_about_when_the_next_step_comes_and_which_is_the_last() -> None:
    requests = asked(300)
    told = with_said_pauses(requests, np.random.default_rng(0))
    assert [each.hints.ends_session for each in told[:5]] == [False, False, False, True, False]
    assert told[3].hints.pause_ms is None
    of_the_first = [each.hints.pause_ms for each in told[::4]]
    errors = np.log(np.array(of_the_first, float) / 1000 / requests[1].pause_s)
    assert np.mean(np.abs(errors) < math.log(2)) == pytest.approx(0.68, abs=0.08)
    assert [replace(each, hints=requests[0].hints) for each in told[:4]] == requests[:4]


def test_sessions_are_scaled_and_split_by_purpose() -> None:
    factor = factor_for([SESSION], H800_QWEN3_32B)
    assert 1800 / factor == pytest.approx(H800_QWEN3_32B.kv_pool_tokens / 2)  # the longest prompt
    known = known_lengths([SESSION], 2.0)
    assert (known.lengths.min(), known.lengths.max()) == (10, 49)  # no quantile is the largest
    assert 150 < sum(held_out(Session(f"trace_{number}", ())) for number in range(400)) < 250


def test_recordings_are_read_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl.gz"
    row = {"session": "a", "requests": [[0.0, 100, 0, -1, 0], [9.0, 200, 7, 0, 64]]}
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (session,) = read_sessions(path)
    assert session == Session("a", (Step(0.0, 100, 1, None, 0), Step(9.0, 200, 7, 0, 64)))
    path.write_bytes(gzip.compress(b'{"session": "a"}'))
    for unreadable in (path, tmp_path / "missing"):
        with pytest.raises(WorkloadError, match="holds no sessions"):
            read_sessions(unreadable)
