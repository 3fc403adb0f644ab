"""Implements `sage-sched formats`, which lists the formats of logs that whatif and warm read."""

from __future__ import annotations

import argparse

from predictor_store.logs.registry import FORMATS
from predictor_store.terminal import add_json, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the formats that whatif and warm recognise, with an example row of each. Files are "
        "JSON lines, JSON arrays or objects, CSV or Parquet; gzip and zstd are unpacked."
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.json:
        print_json({each.name: [each.title, each.gives, each.example] for each in FORMATS})
    else:
        print("\n\n".join(f"{f.name}: {f.title}\n  {f.gives}\n  {f.example}" for f in FORMATS))
    return 0
