"""The records of a server's witnesses, and the checks on them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# What an aborted request may still say: its abort is carried out with the step in flight, and the
# one after it.
_LAST_WORDS = 3
# After a pause that retracts all, SGLang still refuses to flush for a request whose grammar is
# being made, and for a streaming session's turn that its last pass matched with the session's KV
# but did not admit (Scheduler.is_fully_idle).
_MAY_BLOCK_FLUSH = frozenset({"grammar", "waiting turn"})
Event = Mapping[str, Any]


class Evidence:
    """The records of one server, from its start."""

    def __init__(self, folder: Path) -> None:
        self._schedulers = {path.stem: _read(path) for path in folder.glob("scheduler-*.jsonl")}
        self._http = _read(folder / "http.jsonl")

    def states_met(self) -> Counter[str]:
        """Return the states of aborted requests when the abort came."""
        return Counter(
            state
            for name, events in self._schedulers.items()
            if name.endswith("tp0")
            for event in events
            if event["event"] == "abort"
            for state, _ in event["met"].values()
        )

    def lost_kv(self) -> set[str]:
        """The ids of the requests that were retracted and kept no copy, or lost it to a flush."""
        events = [event for events in self._schedulers.values() for event in events]
        return {event["rid"] for event in events if event["event"] == "kv lost"}

    def findings(self) -> list[str]:
        return [*self._lost_aborts(), *self._answered_twice(), *self._refused_flushes()]

    def _lost_aborts(self) -> list[str]:
        """Requests that the HTTP process was told to abort, and that ran to their natural end."""
        found = []
        # By admitted request: how often all had been aborted before.
        let_in: dict[str, int] = {}
        wanted: set[str] = set()
        num_of_all = 0
        for event in self._http:
            if event["event"] == "let in":
                let_in |= dict.fromkeys(event["rids"], num_of_all)
            elif event["event"] == "abort":
                num_of_all += event["all"]
                wanted |= set(event["known"]) & let_in.keys()
        for rid in sorted(wanted):
            for events in self._schedulers.values():
                if (problem := _lost(rid, events, let_in[rid])) is not None:
                    found.append(f"{rid}: {problem}")
                    break
        return found

    def _answered_twice(self) -> list[str]:
        ends = Counter(event["rid"] for event in self._http if event["event"] == "finish")
        return [f"{rid} was answered {num} times" for rid, num in ends.items() if num > 1]

    def _refused_flushes(self) -> list[str]:
        """Flushes that a paused scheduler refused without a reason of SGLang's own."""
        return [
            f"{name}: paused, but the cache was not flushed: {event['blockers']}"
            for name, events in self._schedulers.items()
            for event in events
            if event["event"] == "flush refused"
            and (not event["blockers"] or event["blockers"].keys() - _MAY_BLOCK_FLUSH)
        ]


def _read(path: Path) -> list[Event]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _lost(rid: str, events: Iterable[Event], num_of_all_before: int) -> str | None:
    """Return how one scheduler lost the abort of a request; None if it did not.

    num_of_all_before: how often all were aborted before the request was there.
    """
    arrived, aborts_before, passed_by, met = False, -num_of_all_before, 0, []
    for event in events:
        if event["event"] == "abort":
            if rid in event["met"]:
                met.append((*event["met"][rid], event.get("step")))
            elif event["all"] or event["rid"] == rid:
                aborts_before += not arrived
                passed_by += arrived
        elif event["event"] == "pause" and event["mode"] == "retract":
            # SGLang aborts a chunked prompt before the next step, but not if a pause has moved it
            # to the queue meanwhile (process_pending_chunked_abort in managers/scheduler.py).
            met = [each for each in met if each[::2] != ("chunked", event["step"])]
        elif event.get("rid") != rid:
            continue
        elif event["event"] == "arrive":
            arrived = True
        elif event["event"] == "finish" and event["reason"] != "abort":
            if met:
                state, num_tokens, _ = met[0]
                late = event["tokens"] - num_tokens
                if late > _LAST_WORDS:
                    return f"aborted while {state}, and said {late} more tokens to its end"
            elif passed_by:
                return (
                    f"the scheduler did not find it to abort, and it said {event['tokens']} tokens"
                )
            elif aborts_before > 0 and event["tokens"] > _LAST_WORDS:
                return f"aborted before it reached the scheduler, and said {event['tokens']} tokens"
            else:
                # An abort that came after the end is noted too, and later.
                return _never(rid, event, events)
    return None


def _never(rid: str, finish: Event, events: Iterable[Event]) -> str | None:
    told = any(
        event["event"] == "abort" and (event["all"] or event["rid"] == rid) for event in events
    )
    return None if told else f"no abort reached the scheduler; it said {finish['tokens']} tokens"
