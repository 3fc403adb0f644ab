"""Rows as they stand in a file or a Hugging Face dataset, each with the place it stands at."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_JSON_SPACE = " \t\r\n"
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".gz")


class DatasetError(Exception):
    """The dataset cannot be read at all; the message names it and says why."""


class RowError(Exception):
    """One row is of no use; the message says why."""


def raw_rows(dataset: str) -> Iterator[tuple[str, Any]]:
    """(place, row) for each row; place is "file:line" or "dataset:row number", from 1.

    dataset: a file of JSON lines, a JSON array or Parquet, by its content and gzip too; a folder
    that Hugging Face's datasets library reads; or a name on its hub. The row is a RowError where
    there is none to read. Raises DatasetError.
    """
    path = Path(dataset).expanduser()
    if path.is_file():
        try:
            return _file_rows(path)
        except OSError as error:
            raise DatasetError(f"cannot read {dataset}: {error}") from error
    looks_like_a_path = path.suffix in _SUFFIXES or dataset.startswith(("/", "~", "."))
    if looks_like_a_path and not path.is_dir():
        raise DatasetError(f"there is no file {dataset}")
    return _hub_rows(dataset)


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        return _parquet_rows(path)
    return _json_rows(path, compressed=magic[:2] == b"\x1f\x8b")


def _json_rows(path: Path, compressed: bool) -> Iterator[tuple[str, Any]]:
    # A byte that is no UTF-8 spoils its own row, not the file: as JSON it is just a character.
    opener = gzip.open if compressed else open
    with opener(path, "rt", encoding="utf-8-sig", errors="replace") as file:
        line = 0
        first = True
        try:
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                if first and text.lstrip().startswith("["):
                    yield from _array_rows(path, text + file.read(), line)
                    return
                first = False
                yield f"{path}:{line}", _parse(text)
        except (OSError, EOFError, zlib.error) as error:
            yield f"{path}:{line + 1}", RowError(f"the file cannot be read on from here: {error}")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError(f"not JSON ({error})")


def _array_rows(path: Path, text: str, line: int) -> Iterator[tuple[str, Any]]:
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    counted_to = 0
    while True:
        while position < len(text) and text[position] in _JSON_SPACE + ",":
            position += 1
        line += text.count("\n", counted_to, position)
        counted_to = position
        if text.startswith("]", position):
            return
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            reason = f"not JSON ({error}); the rest of the array is not read"
            yield f"{path}:{line}", RowError(reason)
            return
        yield f"{path}:{line}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1_000):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        reason = f"the file cannot be read on from here: {error}"
        yield f"{path}:{number + 1}", RowError(reason)


def _hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        if Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name)
    # The library raises whatever its layers raise: connection, file system, value errors, its own.
    except Exception as error:
        raise DatasetError(
            f"cannot load the dataset {name}: {type(error).__name__}: {error}. It is neither a "
            "file here nor a dataset that Hugging Face's library can load; without a network, "
            "give the path of a downloaded file"
        ) from error
    if isinstance(loaded, dict):
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    for number, row in enumerate(loaded, start=1):
        yield f"{name}:{number}", row
