"""sage-sched store info: what a store holds."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from predictor_store import lock, store_file
from predictor_store.store import default_path, file_of
from predictor_store.store_file import StoreError
from predictor_store.warm_command import quantiles_line


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, metavar="DIR", help=f"default: {default_path()}")


def run(args: argparse.Namespace) -> int:
    """Exit code 2 with one line on stderr where there is no store or it is damaged."""
    folder = (args.store or default_path()).expanduser().absolute()
    try:
        lines = describe(folder)
    except StoreError as error:
        print(f"sage-sched store info: {error}", file=sys.stderr)
        return 2
    for name, value in lines.items():
        print(f"{name + ':':16}{value}")
    return 0


def describe(folder: Path) -> dict[str, str]:
    """Checks every record on the way; a server may have the store open. Raises StoreError."""
    path = file_of(folder)
    if not path.exists():
        raise StoreError(f"there is no store in {folder}: `sage-sched warm` makes one")
    with contextlib.closing(store_file.connect(path)) as connection:
        meta = store_file.read_meta(connection)
        records = list(store_file.read_records(connection, path))
    num_warm = sum(record.origin == "warm" for record in records)
    num_prompts = sum(record.prompt is not None for record in records)
    pid = lock.holder(folder)
    lines = {
        "store": str(folder),
        "records": f"{len(records)} of at most {meta.get('capacity')} "
        f"({len(records) - num_warm} history, {num_warm} warm)",
        "embedder": f"{meta.get('embedder')}, {meta.get('dimension')} dimensions",
        "prompts": f"text kept of {num_prompts}",
        "file size": f"{path.stat().st_size / 1e6:.1f} MB",
        "in use by": f"process {pid}" if pid is not None else "nobody",
    }
    if records:
        lines["output tokens"] = quantiles_line([record.output_tokens for record in records])
        cut = sum(record.censored for record in records)
        lines["censored"] = f"{cut / len(records):.1%} (cut off by their cap)"
    return lines | _quality_lines(meta.get("quality"))


def _quality_lines(noted: str | None) -> dict[str, str]:
    """Of predictions lately, as a worker has left them."""
    try:
        quality = json.loads(noted or "{}")
        parts = {"predictions": quality, **quality["by_source"]}
        lines = {name: _quality_line(part) for name, part in parts.items()}
        widened = quality["widened"]
    except (ValueError, KeyError, TypeError):
        return {}
    if widened:
        lines["predictions"] += "; worse than none, and not used until they are better"
    return lines


def _quality_line(of: dict[str, Any]) -> str:
    if not of["num_answers"]:
        return "none judged yet"
    return (
        f"{of['num_answers']} answers judged: CRPS gain {of['crps_gain']:.2f}, "
        f"{of['within_80']:.0%} in the central 80 %, rho {of['spearman']:.2f}, "
        f"{of['num_late']} went on without"
    )
