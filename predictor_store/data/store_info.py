"""sage-sched store info: what a store holds."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predictor_store.data.warm import quantiles, quantiles_line
from predictor_store.predict.quality import LEAST_TO_TELL
from predictor_store.store import file, lock
from predictor_store.store.file import StoreError
from predictor_store.store.store import default_path, file_of
from predictor_store.terminal import add_json, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, metavar="DIR", help=f"default: {default_path()}")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 2 with one line on stderr if there is no store or it is damaged."""
    folder = (args.store or default_path()).expanduser().absolute()
    try:
        found = facts(folder)
    except StoreError as error:
        print(f"sage-sched store info: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(found)
        return 0
    for name, value in described(found).items():
        print(f"{name + ':':16}{value}")
    return 0


def facts(folder: Path) -> dict[str, Any]:
    """What the store in folder holds; each record is checked. A server may have it open.
    predictions: RollingQuality.summary, as a worker has left it. Raises StoreError."""
    path = file_of(folder)
    if not path.exists():
        raise StoreError(f"there is no store in {folder}: `sage-sched warm` makes one")
    with contextlib.closing(file.connect(path)) as connection:
        meta = file.read_meta(connection)
        records = list(file.read_records(connection, path))
    lengths = [record.output_tokens for record in records]
    return {
        "store": str(folder),
        "num_records": len(records),
        "capacity": int(meta["capacity"]),
        "num_warm": sum(record.origin == "warm" for record in records),
        "embedder": meta.get("embedder"),
        "dimension": int(meta["dimension"]),
        "num_prompts": sum(record.prompt is not None for record in records),
        "num_bytes": path.stat().st_size,
        "in_use_by": lock.holder(folder),
        "output_tokens": quantiles(lengths) if lengths else {},
        "num_censored": sum(record.censored for record in records),
        "predictions": json.loads(meta.get("quality") or "{}"),
    }


def described(found: Mapping[str, Any]) -> dict[str, str]:
    """The same for people."""
    number, num_warm, pid = found["num_records"], found["num_warm"], found["in_use_by"]
    lines = {
        "store": found["store"],
        "records": f"{number} of at most {found['capacity']} ({number - num_warm} history, "
        f"{num_warm} warm)",
        "embedder": f"{found['embedder']}, {found['dimension']} dimensions",
        "prompts": f"text kept of {found['num_prompts']}",
        "file size": f"{found['num_bytes'] / 1e6:.1f} MB",
        "in use by": "nobody" if pid is None else f"process {pid}",
    }
    if number:
        lines["output tokens"] = quantiles_line(found["output_tokens"])
        lines["censored"] = f"{found['num_censored'] / number:.1%} (cut off by their cap)"
    if quality := found["predictions"]:
        parts = {"predictions": quality, **quality.get("by_source", {})}
        lines |= {name: _quality_line(part) for name, part in parts.items()}
        if quality.get("widened"):
            lines["predictions"] += "; worse than none, and not used until they are better"
    return lines


def _quality_line(of: dict[str, Any]) -> str:
    if of["num_answers"] < LEAST_TO_TELL:
        return f"{of['num_answers']} answers judged, too few to say anything"
    return (
        f"{of['num_answers']} answers judged: CRPS gain {of['crps_gain']:.2f}, "
        f"{of['within_80']:.0%} in the central 80 %, rho {of['spearman']:.2f}"
    )
