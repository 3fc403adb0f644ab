"""Features take part in a scheduler's events in one order, which is the same on all ranks."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from patches.listener import Listener, Listeners
from tests.engine.serving import wait_until
from tests.patches.schedulers import Server, StandInBatch, make_bare_scheduler, make_request

EVENTS = [name for name, _ in inspect.getmembers(Listener, inspect.isfunction) if name[0] != "_"]


def recorder(name: str, calls: list[tuple[str, str, Any]]) -> Listener:
    """A listener that notes its calls."""

    def noting(event: str) -> Any:
        def note(*args: Any) -> Any:
            calls.append((name, event, args))
            return {name: event} if event == "stats" else None

        return note

    listener = Listener()
    for event in EVENTS:
        setattr(listener, event, noting(event))
    return listener


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_reaches_all_in_order_with_all_its_arguments(event: str) -> None:
    calls: list[tuple[str, str, Any]] = []
    both = Listeners([recorder("first", calls), recorder("second", calls)])
    arguments = range(len(inspect.signature(getattr(Listener, event)).parameters) - 1)
    getattr(both, event)(*arguments)
    assert calls == [(name, event, (*arguments,)) for name in ("first", "second")]


def traced(file: Path) -> Server:
    scheduler = make_bare_scheduler()
    scheduler.server_args._sage_trace = str(file)
    return Server(scheduler)


def test_the_order_is_fixed(tmp_path: Path) -> None:
    # Ranks must agree. What each needs of the ones before is said in state.py.
    server = traced(tmp_path / "trace")
    names = [type(listener).__name__ for listener in server.state.listeners]
    assert names == [
        "Calibration", "Jobs", "WaitingJobs", "Trace", "WaitListener", "GapMeter", "SloMeter",
        "OverloadGate", "PassMeter", "SchedulerMetrics",
    ]  # fmt: skip


def test_a_wait_is_reported_before_it_ends(tmp_path: Path) -> None:
    server = traced(tmp_path / "trace")
    (req,) = server.arrive(make_request([9]))
    req.sage.waits.since_s -= 5.0
    batch = StandInBatch([req], prefills=True)
    for _ in range(2):
        server.state.listeners.ran(batch)
    wait_until(lambda: server.stats()["trace"]["num_written"] == 3)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [line["is"] for line in lines] == ["policy", "came", "starts"]
    assert lines[-1]["waited_s"] >= 5.0
    assert req.sage.waits.since_s is None


def test_an_end_comes_once(server: Server) -> None:
    calls: list[tuple[str, str, Any]] = []
    server.state.listeners.append(recorder("last", calls))
    finished, aborted = server.arrive(make_request([9]), make_request([9]))
    finished.finished_reason = "stop"
    for _ in range(2):  # under overlap it is in one more step
        server.state.end_finished([finished, aborted])
        server.state.end(aborted, was_aborted=True)
    ends = [args for _, event, args in calls if event == "ended"]
    assert ends == [(finished, False), (aborted, True)]
