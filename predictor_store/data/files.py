"""Raw rows of a file or of a server's log, each with its place."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from predictor_store.data import server_records
from predictor_store.data.server_records import MALFORMED, Answered

_GZIP = b"\x1f\x8b"
# The beginning of a line that says whether a server wrote it.
_DATE_BYTES = 16


class DatasetError(Exception):
    """The dataset cannot be read at all; the message names it and says why."""


class RowError(Exception):
    """One row is of no use; the message says why."""


def raw_rows(dataset: str, tokenizer: Any = None) -> Iterator[tuple[str, Any]]:
    """(place, row) for each row; place is "file:line" or "file:row number", from 1. The row is a
    RowError if it cannot be read. Raises DatasetError.

    dataset: a file of JSON lines, a JSON array or Parquet, recognised by its content, gzip too; or
    SGLang's request log, or a folder of them. tokenizer: see server_records.read_line.
    """
    path = Path(dataset).expanduser()
    try:
        if path.is_file():
            return _file_rows(path, tokenizer)
        if path.is_dir() and (logs := [*filter(_is_log, sorted(path.rglob("*")))]):
            return itertools.chain.from_iterable(_file_rows(file, tokenizer) for file in logs)
    except OSError as error:
        raise DatasetError(f"cannot read {dataset}: {error}") from error
    missing = "request log in" if path.is_dir() else "file"
    raise DatasetError(f"there is no {missing} {dataset}")


def _is_log(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return server_records.is_line(file.read(_DATE_BYTES).decode("latin-1"))


def _file_rows(path: Path, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        return _parquet_rows(path)
    return _json_rows(path, tokenizer, compressed=magic[:2] == _GZIP)


def _row_of(found: Answered) -> dict[str, Any] | RowError:
    if found.ids and not found.prompt:
        return RowError("its prompt is token ids: --tokenizer reads them")
    if not found.prompt:
        return RowError("it has no prompt: --log-requests-level 2 writes it down")
    return {
        "prompt": found.prompt,
        "output_tokens": found.output_tokens,
        "prompt_tokens": found.input_tokens,
        "cap": found.output_tokens if found.is_cut else None,
    }


def _json_rows(path: Path, tokenizer: Any, compressed: bool) -> Iterator[tuple[str, Any]]:
    # A byte that is no UTF-8 spoils its own row, not the file.
    opener = gzip.open if compressed else open
    with opener(path, "rt", encoding="utf-8-sig", errors="replace") as file:
        line = 0
        try:
            numbered = ((line, text) for line, text in enumerate(file, 1) if text.strip())
            line, text = next(numbered, (0, ""))
            if text.lstrip().startswith("[") and not server_records.is_line(text):
                yield from _array_rows(path, text + file.read())
                return
            rows = itertools.chain([(line, text)] if line else [], numbered)
            for line, text in server_records.without_noise(rows):
                yield from ((f"{path}:{line}", row) for row in _rows_of_line(text, tokenizer))
        except (OSError, EOFError, zlib.error) as error:
            yield f"{path}:{line + 1}", RowError(f"the file cannot be read on from here: {error}")


def _rows_of_line(line: str, tokenizer: Any) -> list[Any]:
    try:
        found = server_records.read_line(line, tokenizer)
        return [_row_of(row) if isinstance(row, Answered) else row for row in found]
    except (json.JSONDecodeError, RecursionError) as error:
        return [RowError(f"not JSON ({error})")]
    except MALFORMED as error:
        return [RowError(f"it is not as SGLang writes it ({error!r})")]


def _array_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        rows = [RowError(f"not JSON ({error})")]
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches()
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, 1))
    except (OSError, ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
