"""Reads the raw rows of a file, each with its place.

A file may be JSON lines, a JSON array, JSON over many lines, CSV, Parquet or a server's log, also
compressed by gzip or zstd.
"""

from __future__ import annotations

import csv
import itertools
import json
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from predictor_store.cached_file import expanded
from predictor_store.logs import server_lines
from predictor_store.logs.errors import DatasetError, RowError
from predictor_store.logs.formats.table import is_known_column
from predictor_store.logs.json_values import json_values
from predictor_store.logs.lines import MOST_LINE_CHARS, PARQUET, magic_of, opened_lines

Rows = Generator[tuple[str, Any], None, None]
_DAMAGE = (OSError, EOFError, zlib.error)
_SEPARATORS = ",\t;|"
_PARQUET_ROWS = 512


class CsvRow(dict[str, Any]):
    """A row of a CSV file: all values are texts."""


def raw_rows(dataset: str) -> Rows:
    """Yield (place, row) for each row of a file. Raises DatasetError.

    place is "file:line" or "file: row number", counted from 1. The row is a RowError if it cannot
    be read.
    """
    try:
        path = expanded(dataset)
        if not path.is_file():
            raise DatasetError(f"there is no file {dataset}")
        if magic_of(path) == PARQUET:
            return _parquet_rows(path)
        return _text_rows(path)
    except OSError as error:
        raise DatasetError(f"cannot read {dataset}: {error}") from error


def _text_rows(path: Path) -> Rows:
    line = 0
    try:
        with opened_lines(path) as lines:
            numbered = server_lines.unwrapped(
                (line, text) for line, text in enumerate(lines, 1) if text.strip()
            )
            line, first = next(numbered, (0, ""))
            if "\0" in first:
                raise DatasetError(f"{path} is neither text, Parquet, gzip nor zstd")
            is_array = first.lstrip().startswith("[") and not server_lines.is_line(first)
            if is_array or _is_begun(path, first):
                yield from _json_rows(path, is_array)
                return
            rows = itertools.chain([(line, first)] if line else [], numbered)
            if names := _columns(first, path):
                yield from _csv_rows(path, names, rows)
                return
            for line, text in server_lines.without_noise(rows):
                for row in server_lines.rows_of_line(text):
                    yield f"{path}:{line}", row
    except _DAMAGE as error:
        yield f"{path}:{line + 1}", _broken_off(error)


def _is_begun(path: Path, first: str) -> bool:
    """Whether an object begins in the first line and ends in another."""
    if not first.lstrip().startswith("{"):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        with opened_lines(path) as lines:
            try:
                return next(json_values(lines, is_array=False), None) is not None
            except (ValueError, *_DAMAGE):
                return False
    return False


def _json_rows(path: Path, is_array: bool) -> Rows:
    number = 0
    with opened_lines(path) as lines:
        try:
            for number, row in enumerate(json_values(lines, is_array=is_array), 1):
                yield f"{path}: row {number}", row
        except (ValueError, *_DAMAGE) as error:
            yield f"{path}: row {number + 1}", _broken_off(error)


def _broken_off(error: Exception) -> RowError:
    return RowError("where the file breaks off", f"it cannot be read on from here: {error}")


def _columns(first: str, path: Path) -> list[str]:
    """Return the names in a CSV file's first line, or [] if it is no CSV file."""
    if first.lstrip().startswith(("{", "[")):
        return []
    separator = max(_SEPARATORS, key=first.count)
    names = [name.strip() for name in next(csv.reader([first.strip()], delimiter=separator), [])]
    is_named = path.name.lower().removesuffix(".gz").removesuffix(".zst").endswith((".csv", ".tsv"))
    if len(names) < 2 or not (is_named or any(map(is_known_column, names))):
        return []
    return [*names, separator]


def _csv_rows(path: Path, names: list[str], rows: Iterator[tuple[int, str]]) -> Rows:
    *names, separator = names
    csv.field_size_limit(MOST_LINE_CHARS)  # prompts are long
    next(rows)
    # csv joins a text that covers several lines, so it must see the lines itself.
    reader = csv.reader((line for _, line in rows), delimiter=separator)
    for number in itertools.count(2):
        place = f"{path}: row {number}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield place, RowError("that is no CSV", str(error))
            continue
        if len(values) > len(names):
            yield place, RowError("with too many columns", f"{len(values)} of {len(names)}")
        else:
            yield place, CsvRow(zip(names, values, strict=False))


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=_PARQUET_ROWS)
        rows = itertools.chain.from_iterable(
            _in_microseconds(pyarrow.Table.from_batches([batch])).to_pylist() for batch in batches
        )
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def _in_microseconds(table: Any) -> Any:
    """Round times to microseconds, because Python's dates have no nanoseconds."""
    import pyarrow

    fields = [
        field.with_type(pyarrow.timestamp("us", field.type.tz))
        if pyarrow.types.is_timestamp(field.type)
        else field
        for field in table.schema
    ]
    return table.cast(pyarrow.schema(fields), safe=False)
