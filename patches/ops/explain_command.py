"""`sage-sched explain`: what a trace (--sage-trace) says of a request, or of all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patches.ops.decisions import Event, last_run, of_request, summary, timeline, told
from predictor_store.terminal import add_json, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what happened to a request and why, by the file that a server started with "
        "--sage-trace has written; or, with --summary, who waited for whom and why."
    )
    parser.add_argument("rid", nargs="?", help="the request's id (meta_info.id of its answer)")
    parser.add_argument("file", type=Path, help="what --sage-trace names")
    parser.add_argument("--summary", action="store_true", help="of all requests")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if (args.rid is None) is not args.summary:
        print("sage-sched explain: give a request's id, or --summary", file=sys.stderr)
        return 2
    events = last_run(events_of(args.file))
    found: Any = summary(events) if args.summary else of_request(events, args.rid)
    if not found:
        print(f"sage-sched explain: {args.file} knows no request {args.rid}", file=sys.stderr)
        return 1
    if args.json:
        print_json(found)
    else:
        print("\n".join(told(found) if args.summary else timeline(events, args.rid)))
    return 0


def events_of(file: Path) -> Iterator[Event]:
    """The events in FILE.1, if there is one, and in the file, without truncated lines. Raises
    OSError."""
    before = Path(f"{file}.1")
    for path in [before, file] if before.exists() else [file]:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and "t" in event and "is" in event:
                    yield event
