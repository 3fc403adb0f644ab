"""Implements `sage-sched settings`, which lists the settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from textwrap import fill, wrap

from predictor_store.terminal import print_json
from sage_sched.app.schema import default_of, json_schema, leaves
from sage_sched.fields import allowed


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help="such as policy.sage; default: all"
    )
    parser.add_argument(
        "--json-schema", action="store_true",
        help="print the JSON schema of settings files, for editors and charts",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.json_schema:
        print_json(json_schema())
    else:
        print(listing(args.sections))
    return 0


def listing(sections: Iterable[str]) -> str:
    """Return the settings of some sections, or of all if none is given, with default, meaning and
    range."""
    starts = tuple(f"{section}." for section in sections)
    lines = []
    for name, leaf in leaves(json_schema()):
        if not starts or name.startswith(starts):
            meaning = f"{leaf['description']} Allowed: {allowed(name, leaf)}.".strip()
            lines += [f"{name} = {default_of(leaf)}", *(f"    {line}" for line in wrap(meaning))]
    return "\n".join(lines)


def add_listing(parser: argparse.ArgumentParser, *sections: str) -> None:
    """Let a command's help list the settings of these sections."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = fill(parser.description or "")
    parser.epilog = f"settings:\n{listing(sections)}"
