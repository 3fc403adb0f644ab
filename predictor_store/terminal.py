"""Where a command's output goes: to people, to a program, to a log, or to nobody any more."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option of a command that has numbers to tell."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON, for a program, in the place of text"
    )


def speaker(args: argparse.Namespace) -> Callable[..., None]:
    """What prints text for people; with --json it prints nothing."""
    return _nothing if args.json else print


def _nothing(*_: object, **__: object) -> None:
    pass


def print_json(found: Any) -> None:
    """One document."""
    print(json.dumps(found, indent=2))


def keep_quiet() -> None:
    """Of packages that are imported after this: no warnings about themselves, nothing looked for in
    a network, and without a terminal no progress bars."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def stop_printing() -> None:
    """Nobody reads any more (`head` has seen enough): nothing more is to fail at that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
