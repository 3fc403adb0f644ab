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

    def findings(self) -> list[str]:
        return [*self._lost_aborts(), *self._answered_twice(), *self._refused_flushes()]

    def _lost_aborts(self) -> list[str]:
        """Requests that the HTTP process was told to abort, and that ran to their natural end."""
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
        return [
            f"{rid}: {problem}"
            for rid in sorted(wanted)
            for events in self._schedulers.values()
            if (problem := _lost(rid, events, let_in[rid]))
        ]

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
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _lost(rid: str, events: Iterable[Event], num_of_all_before: int) -> str:
    """Return how one scheduler lost the abort of a request; "" if it did not.

    num_of_all_before: how often all were aborted before the request was there.
    """
    has_arrived, num_before, num_missed, met = False, -num_of_all_before, 0, []
    for event in events:
        if event["event"] == "abort":
            if rid in event["met"]:
                met.append((*event["met"][rid], event.get("step")))
            elif event["all"] or event["rid"] == rid:
                num_before += not has_arrived
                num_missed += has_arrived
        elif event["event"] == "pause" and event["mode"] == "retract":
            # SGLang aborts a chunked prompt before the next step, but not if a pause has moved it
            # to the queue meanwhile (process_pending_chunked_abort in managers/scheduler.py).
            met = [each for each in met if each[::2] != ("chunked", event["step"])]
        elif event.get("rid") == rid and event["event"] == "arrive":
            has_arrived = True
        elif event.get("rid") == rid and event["event"] == "finish" and event["reason"] != "abort":
            said = event["tokens"]
            if met:
                state, num_tokens, _ = met[0]
                is_lost = said > num_tokens + _LAST_WORDS
                return f"aborted while {state}, and said {said - num_tokens} more" * is_lost
            if num_missed:
                return f"the scheduler did not find it to abort, and it said {said} tokens"
            if num_before > 0 and said > _LAST_WORDS:
                return f"aborted before it reached the scheduler, and said {said} tokens"
            # An abort that came after the end is noted too, and later.
            aborts = (each for each in events if each["event"] == "abort")
            is_told = any(each["all"] or each["rid"] == rid for each in aborts)
            return "" if is_told else f"no abort reached the scheduler; it said {said} tokens"
    return ""
