"""`sage-sched set`: change the settings of a running server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from predictor_store.terminal import server_url

_KEY_VARIABLE = "SAGE_ADMIN_KEY"
_TIMEOUT_S = 60.0


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
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="with the server's --admin-api-key, or else its --api-key (default: the environment "
        f"variable {_KEY_VARIABLE})",
    )


def run(args: argparse.Namespace) -> int:
    try:
        key = os.environ.get(_KEY_VARIABLE, "")
        if args.key_file is not None:
            key = Path(args.key_file).read_text(encoding="utf-8").strip()
        settings = _asked(args.url, key, changes_of(args.changes))
    except (ValueError, OSError) as error:
        print(f"sage-sched set: {error}", file=sys.stderr)
        return 1
    print(json.dumps(settings, indent=2))
    return 0


def changes_of(assignments: Sequence[str]) -> dict[str, Any]:
    """Turn NAME=VALUE, with dotted names, into the mapping that the server takes. Values are read
    as TOML, or else as text. Raises ValueError."""
    changes, lines = dict[str, Any](), list[str]()
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not all(name.split(".")):
            raise ValueError(f"{assignment!r} is no NAME=VALUE")
        try:
            tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            value = json.dumps(value)
        lines.append(f"{'.'.join(map(json.dumps, name.split('.')))} = {value}")
        try:
            changes = tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError:
            raise ValueError(f"{name} has a value already, or is within what has one") from None
    return changes


def _asked(url: str, key: str, changes: dict[str, Any]) -> Any:
    """The settings now in force. Raises ValueError with the server's reason, OSError."""
    request = urllib.request.Request(
        f"{url}/sage/settings",
        data=json.dumps(changes).encode() if changes else None,
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise ValueError(_reason(error)) from error
    except urllib.error.URLError as error:
        raise ValueError(f"no server answers at {url}: {error.reason}; see --url") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        # Nor has a server in shadow mode settings that could be changed.
        missing = "; is it a server under one of our policies?" if error.code == 404 else ""
        return f"the server answers {error.code} {error.reason}{missing}"
