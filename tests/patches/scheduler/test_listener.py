from __future__ import annotations

import inspect
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from patches.listener import Listener, Listeners
from tests.patches.schedulers import Server, make_request

EVENTS = [name for name, _ in inspect.getmembers(Listener, inspect.isfunction) if name[0] != "_"]


def recorder(name: str, calls: list[tuple[str, str, Any]]) -> Listener:

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


def test_an_end_comes_once(server: Server) -> None:
    calls: list[tuple[str, str, Any]] = []
    server.state.listeners.append(recorder("last", calls))
    finished, aborted, queued = reqs = server.arrive(*(make_request([9]) for _ in range(3)))
    finished.finished_reason, finished.output_ids = "stop", [1, 2, 3]
    aborted.finished_reason = FINISH_ABORT()
    for _ in range(2):  # under overlap it is in one more step
        server.state.end_finished(reqs)
        server.state.end(queued, was_aborted=True)
    ends = [args for _, event, args in calls if event == "ended"]
    assert ends == [(finished, False), (aborted, True), (queued, True)]
    assert finished.sage.job.generated_tokens == 3
