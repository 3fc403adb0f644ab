"""Values of options, checked as argparse wants it."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit


def field_and_value(text: str) -> tuple[str, str]:
    """Of an option FIELD=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    return name, value


def at_least_one(text: str) -> int:
    """Of an option that counts something."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def server_url(text: str) -> str:
    """Of an option that names a server; http:// may be left out."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server, as localhost:30000")
    return url.rstrip("/")
