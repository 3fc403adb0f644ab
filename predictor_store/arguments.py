"""Values of options, checked as argparse wants it."""

from __future__ import annotations

import argparse


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
