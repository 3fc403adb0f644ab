"""`sage-sched explain`: explains one request, or all waits, by a trace (--sage-trace).

A trace is a list of events, written by patches/scheduler/trace.py. In each event, `t` is the
seconds since the server began the trace, `is` the kind of event, and `rid` the request.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predictor_store.logs.lines import text_lines
from predictor_store.terminal import add_json, print_json, printable
from sage_sched.errors import UserError

Event = Mapping[str, Any]
# The fields of each kind of event, except `t` and `is`. An event of another kind has a reason.
_FIELDS = {
    "policy": (),
    "came": (
        "rid", "arrival", "input_tokens", "p50_tokens", "p80_tokens", "source", "num_waiting",
        "num_running",
    ),
    "starts": ("rid", "waited_s", "place", "tokens"),
    "preempt": ("rid", "reason", "way"),
    "ends": ("rid", "tokens", "why"),
}  # fmt: skip
_TEXTS = {"is", "rid", "reason", "way", "why", "source"}
_MAY_BE_NULL = {"p50_tokens", "p80_tokens", "place"}
_MOST_NUMBER = 1e15
# The number of requests listed for each long wait, and of long waits listed.
_NUM_OTHERS, _NUM_WAITS = 3, 10


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what happened to a request and why, by the file that a server started with "
        "--sage-trace has written; or, with --summary, who waited for whom and why."
    )
    parser.add_argument("rid", nargs="?", help="the request's id (meta_info.id of its answer)")
    parser.add_argument("file", type=Path, help="the file of --sage-trace")
    parser.add_argument("--summary", action="store_true", help="explain the waits of all requests")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if (args.rid is None) is not args.summary:
        raise UserError("give a request's id, or --summary")
    events = last_run(events_of(args.file))
    found: Any = summary(events) if args.summary else of_request(events, args.rid)
    if not found:
        raise UserError(f"{args.file} knows no request {args.rid}")
    if args.json:
        print_json(found)
    else:
        lines = summary_lines(found) if args.summary else timeline(events, args.rid)
        print("\n".join(map(printable, lines)))
    return 0


def events_of(file: Path) -> Iterator[Event]:
    """Return the events in FILE.1, if it exists, and in the file, without damaged lines."""
    before = Path(f"{file}.1")
    for path in [before, file] if before.exists() else [file]:
        with path.open("rb") as opened:
            for line in text_lines(opened):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict) and _is_sound(event):
                    yield event


def _is_sound(event: Mapping[str, Any]) -> bool:
    if type(event.get("is")) is not str:
        return False
    for name in ("t", *_FIELDS.get(event["is"], ("rid", "reason"))):
        value = event.get(name, ())
        if name in _TEXTS:
            is_right = type(value) is str
        elif value is None:
            is_right = name in _MAY_BE_NULL
        else:
            is_right = type(value) in (int, float) and abs(value) <= _MOST_NUMBER
        if not is_right:
            return False
    return True


def last_run(events: Iterable[Event]) -> list[Event]:
    """Return the events of the last server that wrote to the file. Each server's seconds begin
    anew."""
    found: list[Event] = []
    for event in events:
        if found and event["t"] < found[-1]["t"]:
            found.clear()
        found.append(event)
    return found


def of_request(events: Iterable[Event], rid: str) -> list[Event]:
    """Return the events of a request, with `t` since it came; [] if it is unknown."""
    found: list[Event] = []
    came_s = 0.0
    for event in events:
        if event.get("rid") == rid and event["is"] == "came":
            came_s = event["t"]
        if event.get("rid") == rid or (event.get("to") == rid and found):
            found.append({**event, "t": event["t"] - came_s})
    return found


def timeline(events: Iterable[Event], rid: str) -> list[str]:
    """Return a line for each event of a request, in plain words."""
    return [
        f"{event['t']:9.3f} s  "
        + (_said(event) if event["rid"] == rid else f"{event['rid']} is preempted for it")
        for event in of_request(events, rid)
    ]


def _said(event: Event) -> str:
    what = event["is"]
    if what == "came":
        answer = "nothing is known of its answer"
        if event["p50_tokens"] is not None:
            answer = (
                f"its answer is predicted to have {event['p50_tokens']} tokens, and with 80 % "
                f"probability at most {event['p80_tokens']} ({event['source']})"
            )
        return (
            f"arrives with {event['input_tokens']} tokens; {answer}; {event['num_running']} "
            f"requests run and {event['num_waiting']} wait{_batch(event)}"
        )
    if what == "starts":
        place = "" if event["place"] is None else f"; {event['place']} were before it at first"
        again = f" again, at {event['tokens']} tokens," if event["tokens"] else ""
        return f"starts{again} after waiting {event['waited_s']:.3f} s{place}"
    if what == "preempt":
        to = f" for {event['to']}" if event.get("to") else ""
        return f"is preempted{to}: {event['reason']}; {event['way']}"
    if what == "ends":
        return f"ends with {event['tokens']} tokens ({event['why']}){_batch(event)}"
    bound = ", because no other may overtake it any more" if event.get("goes_first") else ""
    words = {"admit": "may enter", "resume": "comes back", "stays": "stays where it is"}
    return f"{words.get(what, what)}: {event['reason']}{bound}"


def _batch(event: Event) -> str:
    """Return the text of an event about its request's batch."""
    match event.get("batch"):
        case {
            "batch": str(name), "num_requests": int(number), "num_ended": int(num_ended),
            "done_in_s": float(left_s), "predicted_in_s": float(end_s),
        }:  # fmt: skip
            return (
                f"; {num_ended} of {number} requests of batch {name} have ended, the last one is "
                f"predicted to end in {end_s:.1f} s, and {left_s:.1f} s are left for it"
            )
    return ""


@dataclass(slots=True, eq=False)
class _Known:
    """One request: when it came, its predicted length, how long it has waited."""

    rid: str
    arrival: int
    p50_tokens: float
    waited_s: float = 0.0
    num_preemptions: int = 0


_BEFORE, _SHORTER, _OTHERWISE = (
    "for one that had come before",
    "for one that had come later and was predicted to be shorter",
    "for one that had come later, by its prompt, its age, a hint or a bound",
)


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Return which requests waited for which, and why; see summary_lines.

    The seconds in which a request waits are shared equally among the requests that run meanwhile.
    """
    why_s, known = Counter[str](), dict[str, _Known]()
    for seconds, waiting, running in _intervals(events, known):
        for each in waiting:
            each.waited_s += seconds
        for why, share in _shares(waiting, running).items():
            why_s[why] += share * seconds  # type: ignore[assignment]
    reasons = Counter(f"{event['is']}: {event['reason']}" for event in events if "reason" in event)
    longest = sorted(known.values(), key=lambda each: -each.waited_s)[:_NUM_WAITS]
    return {
        "num_requests": len(known),
        "waited_s": sum(each.waited_s for each in known.values()),
        "num_preemptions": sum(each.num_preemptions for each in known.values()),
        "waited_for_s": dict(why_s.most_common()),
        "num_decided": dict(reasons.most_common()),
        "longest": _longest(events, longest),
    }


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """Return a summary as lines to print."""
    total_s = found["waited_s"]
    lines = [
        f"{found['num_requests']} requests waited {total_s:.3f} s in all and were preempted "
        f"{found['num_preemptions']} times",
        *(f"{seconds / total_s:7.1%}  {why}" for why, seconds in found["waited_for_s"].items()),
        "",
        "how often what was decided:",
        *(f"{number:7d}  {reason}" for reason, number in found["num_decided"].items()),
        "",
        "the longest waits, and for whom:",
    ]
    for wait in found["longest"]:
        lines.append(f"{wait['waited_s']:9.3f} s  {wait['rid']}")
        lines += [
            f"{other['seconds']:11.3f} s  {other['rid']}: {other['why']}" for other in wait["for"]
        ]
        rest_s = wait["waited_s"] - sum(other["seconds"] for other in wait["for"])
        lines += [f"{rest_s:11.3f} s  others"] if rest_s > 0.0005 else []
    return lines


def _intervals(
    events: Iterable[Event], known: dict[str, _Known]
) -> Iterator[tuple[float, list[_Known], list[_Known]]]:
    """Yield the seconds between each event and the next, with the requests that wait and run then.
    known: gets the requests of the events."""
    waiting, running = dict[str, _Known](), dict[str, _Known]()
    last_s = 0.0
    for event in events:
        if event["t"] > last_s and waiting:
            yield event["t"] - last_s, list(waiting.values()), list(running.values())
        last_s = event["t"]
        what, rid = event["is"], event.get("rid", "")
        if what == "came":
            p50_tokens = event["p50_tokens"]
            one = _Known(rid, event["arrival"], math.nan if p50_tokens is None else p50_tokens)
            known[rid] = waiting[rid] = one
        elif rid in known and what in ("starts", "resume", "preempt", "stays", "ends"):
            # The arrivals of other requests are lost, if the file was full.
            waiting.pop(rid, None)
            running.pop(rid, None)
            if what in ("starts", "resume"):
                running[rid] = known[rid]
            elif what != "ends":
                waiting[rid] = known[rid]
                known[rid].num_preemptions += what == "preempt"


def _shares(waiting: Sequence[_Known], running: Sequence[_Known]) -> dict[str, float]:
    """Return the number of requests that wait for each reason. A request with several reasons
    counts by parts of one."""
    if not running:
        return {"no request ran": len(waiting)}
    mine, theirs = (
        np.array([[each.arrival, each.p50_tokens] for each in group])
        for group in (waiting, running)
    )
    before = theirs[None, :, 0] < mine[:, None, 0]
    shorter = ~before & (theirs[None, :, 1] < mine[:, None, 1])
    counts = {_BEFORE: before.sum(), _SHORTER: shorter.sum()}
    counts[_OTHERWISE] = before.size - sum(counts.values())
    return {why: float(count) / len(running) for why, count in counts.items() if count}


def _longest(events: Sequence[Event], longest: Sequence[_Known]) -> list[dict[str, Any]]:
    """Return the requests for which each of the longest waits waited."""
    for_whom: dict[str, Counter[_Known]] = {each.rid: Counter() for each in longest}
    for seconds, waiting, running in _intervals(events, {}):
        for waits in (for_whom[each.rid] for each in waiting if each.rid in for_whom):
            for runner in running:
                waits[runner] += seconds / len(running)  # type: ignore[assignment]
    found = []
    for each in (one for one in longest if one.waited_s > 0):
        others = [
            {"rid": other.rid, "seconds": seconds, "why": next(iter(_shares([each], [other])))}
            for other, seconds in for_whom[each.rid].most_common(_NUM_OTHERS)
        ]
        found.append({"rid": each.rid, "waited_s": each.waited_s, "for": others})
    return found
