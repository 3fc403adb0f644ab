"""Defines the options of commands that read logs."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

from predictor_store.logs.clock import UNITS
from predictor_store.logs.reader import ReadOptions
from predictor_store.logs.registry import BY_NAME


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=sorted(BY_NAME), default="", metavar="NAME",
        help="the format of the logs, as `sage-sched formats` names it (default: recognise it)",
    )  # fmt: skip
    parser.add_argument(
        "--time-unit", choices=UNITS, help="the unit of plain numbers as times (default: guess it)"
    )
    parser.add_argument(
        "--tz", type=_zone, metavar="ZONE",
        help="the zone of dates without one, such as Europe/Berlin or +02:00 (default: UTC)",
    )  # fmt: skip


def read_options(args: argparse.Namespace) -> ReadOptions:
    """Return the options for reading. Only some commands have the option --filter."""
    filters = dict(getattr(args, "filter", ()))
    return ReadOptions(args.format, args.time_unit, args.tz, filters)


def _zone(text: str) -> tzinfo:
    if text.upper() in ("UTC", "Z"):
        return UTC
    try:
        if text[:1] in "+-":
            return datetime.fromisoformat(f"2000-01-01T00:00{text}").tzinfo or UTC
        return ZoneInfo(text)
    except (ValueError, OSError, KeyError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time zone like Europe/Berlin or +02:00"
        ) from error
