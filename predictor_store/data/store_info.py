"""Implements `sage-sched store info`, which shows the contents of a store."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from predictor_store.data.warm import quantiles
from predictor_store.store import file, lock
from predictor_store.store.file import StoreError
from predictor_store.store.store import file_of, folder_of, has_store
from predictor_store.terminal import add_json, add_store, print_found
from sage_sched.app.config import StoreConfig


def configure(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the contents of the store. Raises StoreError if there is no store or it is damaged."""
    print_found(facts(folder_of(StoreConfig(path=args.store))), args.json)
    return 0


def facts(folder: Path) -> dict[str, Any]:
    """Return the contents of the store in folder, and check each record.

    Nothing is changed, and a server may have the store open. Raises StoreError.

    predictions: RollingQuality.summary, as the last worker wrote it.
    """
    if not has_store(folder):
        raise StoreError(f"there is no store in {folder}: `sage-sched warm` makes one")
    path = file_of(folder)
    with contextlib.closing(file.connect_to_read(path)) as connection:
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
        "num_bytes": path.stat().st_size,
        "in_use_by": lock.holder(folder),
        "output_tokens": quantiles(lengths) if lengths else {},
        "num_censored": sum(record.censored for record in records),
        "predictions": json.loads(meta.get("quality") or "{}"),
    }
