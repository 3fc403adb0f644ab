"""Checks the options of all commands, and prints results for people or programs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit


def field_and_value(text: str) -> tuple[str, str]:
    """Parse an option FIELD=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    return name, value


def at_least_one(text: str) -> int:
    """Parse an option that counts something."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def server_url(text: str) -> str:
    """Parse an option that names a server; http:// may be left out."""
    url = text if "://" in text else f"http://{text}"
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if is_server and url.isprintable() and not any(mark in url for mark in " ?#@"):
            return url.rstrip("/")
    raise argparse.ArgumentTypeError(f"{text!r} is not a server address, such as localhost:30000")


def host_and_port(text: str) -> tuple[str, int]:
    """Parse an option that is a port of this host, or host:port."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, or host:port")
    return host or "127.0.0.1", int(port)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json of a command that prints numbers."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON, for a program, instead of text"
    )


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the option --store of a command that works on the predictor's store."""
    parser.add_argument(
        "--store", default="", metavar="DIR", help="default: sage-sched/store in the user's cache"
    )


def can_plot() -> bool:
    """Whether pictures can be drawn. If not, stderr says how to enable them."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    print('no pictures: pip install "sage-sched[plots]"', file=sys.stderr)
    return False


def speaker(args: argparse.Namespace) -> Callable[..., None]:
    """Return a function that prints text for the user; with --json it prints nothing."""
    return (lambda *_, **__: None) if args.json else print


def printable(text: object) -> str:
    """Escape control characters and the like. Text from clients and servers must not act on a
    terminal, or look like lines of ours."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text)
    )


def print_json(found: Any) -> None:
    print(json.dumps(found, indent=2))


def print_found(found: Mapping[str, Any], as_json: bool) -> None:
    """Print a command's results: as JSON, or one name and value a line."""
    if as_json:
        print_json(found)
    else:
        print("\n".join(_lines(found)))


def _lines(found: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            said = f"{value:.5g}" if type(value) is float else value
            yield printable(f"{prefix}{name}: {said}")


def keep_quiet() -> None:
    """Keep packages quiet. Call this before they are imported. They then print no warnings about
    themselves, do not use the network, and show no progress bars without a terminal."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def take_any_output() -> None:
    """Make any output printable. Call this first. Unencodable characters are then escaped, and
    output to a closed stream is lost."""
    # Otherwise the next opened file, such as a store, would become stdout or stderr.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):  # tests have streams of their own
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def stop_printing() -> None:
    """Stop printing, because the reader has closed the pipe (`head`, for example). Later prints
    must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stop_printing_if_full() -> None:
    """Do not report at exit that stdout is full, because that error was reported already."""
    try:
        sys.stdout.flush()
    except OSError:
        stop_printing()
