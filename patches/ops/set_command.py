"""Implements `sage-sched set`, which changes the settings of a running server."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from typing import Any

from predictor_store.ask_server import RefusedError, add_key, ask, key_of
from predictor_store.settings_command import add_listing
from predictor_store.terminal import print_json, server_url
from sage_sched.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Change the settings of a running server without a restart, and show them. Without a "
        "NAME=VALUE they are only shown. For example: sage-sched set schedule_policy=fcfs "
        "policy.sage.regret=4 preemption.enabled=false"
    )
    parser.add_argument(
        "changes", nargs="*", metavar="NAME=VALUE", help="schedule_policy, or section.field"
    )
    parser.add_argument(
        "--url", type=server_url, default="http://127.0.0.1:30000", help="default: %(default)s"
    )
    add_key(parser, "the server's --admin-api-key, or else its --api-key")
    add_listing(parser, "policy", "preemption", "decode", "overload")


def run(args: argparse.Namespace) -> int:
    changes = changes_of(args.changes)
    try:
        print_json(ask(f"{args.url}/sage/settings", key_of(args.key_file), changes or None))
    except RefusedError as error:
        if error.status != 404:
            raise
        # A server in shadow mode has no settings to change either.
        raise UserError(f"{error}; is it a server under one of our policies?") from error
    return 0


def changes_of(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the mapping that the server takes, from NAME=VALUE with dotted names. Values are read
    as TOML, or else as text. Raises UserError."""
    changes = dict[str, Any]()
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        *sections, last = name.split(".")
        if not equals or not all((*sections, last)):
            raise UserError(f"{assignment!r} is no NAME=VALUE")
        section: Any = changes
        for part in sections:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict) or last in section:
            raise UserError(f"{name} has a value already, or is part of a setting that has one")
        section[last] = _value_of(text)
    return changes


def _value_of(text: str) -> Any:
    """Return the TOML value of a text, or the text itself if JSON has no such value (a date, for
    example)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
        json.dumps(parsed)
    except (ValueError, TypeError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text
