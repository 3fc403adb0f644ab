"""Raw rows of a file or of a server's log, each with its place."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from predictor_store.cached_file import expanded
from predictor_store.data import server_records
from predictor_store.data.server_records import Answered
from sage_sched.fields import MALFORMED, UserError

_GZIP = b"\x1f\x8b"
# The beginning of a line that says whether a server wrote it.
_DATE_BYTES = 16
# The longest line, and the longest row of an array: bench_serving writes a run in a line.
MOST_LINE_CHARS = 2**26
# Read at a time of an array.
_ARRAY_CHARS = 2**20
# Before a row of an array, or after its last.
_BETWEEN = re.compile(r"\s*(\[\s*\]|[\[\],])\s*")


class DatasetError(UserError):
    """The dataset cannot be read at all; the message names it and says why."""


class RowError(Exception):
    """One row is of no use; the message says why."""


def text_lines(file: IO[bytes]) -> Iterator[str]:
    """The lines of a text. They end with a line feed, a carriage return or both. A byte that is no
    UTF-8 spoils its own line. A longer line than any that is meant comes in pieces, so that a
    damaged or hostile file takes no more memory than another."""
    text = io.TextIOWrapper(file, "utf-8-sig", "replace", newline=None)
    while line := text.readline(MOST_LINE_CHARS):
        yield line


def raw_rows(dataset: str, tokenizer: Any = None) -> Iterator[tuple[str, Any]]:
    """(place, row) for each row; place is "file:line" or "file:row number", from 1. The row is a
    RowError if it cannot be read. Raises DatasetError.

    dataset: a file of JSON lines, a JSON array or Parquet, recognised by its content, gzip too; or
    SGLang's request log, or a folder of them. tokenizer: see server_records.read_line.
    """
    try:
        path = expanded(dataset)
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
    with path.open("rb") as opened, gzip.open(opened) if compressed else opened as file:
        line = 0
        try:
            lines = text_lines(cast(IO[bytes], file))
            numbered = ((line, text) for line, text in enumerate(lines, 1) if text.strip())
            line, text = next(numbered, (0, ""))
            if text.lstrip().startswith("[") and not server_records.is_line(text):
                yield from _array_rows(path, itertools.chain([text], lines))
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


def _array_rows(path: Path, pieces: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON array, of which little more than a row is held at a time. Raises
    DatasetError where it is none."""
    decode = json.JSONDecoder().raw_decode
    text, at, number, wanted, is_whole = "", 0, 0, _ARRAY_CHARS, False
    while True:
        try:
            between = _BETWEEN.match(text, at)
            mark, begin = (between[1], between.end()) if between else ("", at)
            if mark.endswith("]") and (mark == "]") is (number > 0):
                if text[begin:] or any(piece.strip() for piece in pieces):
                    raise ValueError("something follows it")
                return
            if mark != ("," if number else "["):
                raise ValueError(f"a comma or bracket is missing after row {number}")
            row, end = decode(text, begin)
            if end == len(text) and not is_whole:
                raise ValueError("a number may go on")
        except (ValueError, RecursionError) as error:
            held = [text[at:]]
            if is_whole or len(held[0]) > MOST_LINE_CHARS:
                raise DatasetError(f"{path} is no JSON array ({error})") from error
            num_chars, at = len(held[0]), 0
            wanted = max(wanted, 2 * num_chars)
            for piece in pieces:
                held.append(piece)
                num_chars += len(piece)
                if num_chars >= wanted:
                    break
            else:
                is_whole = True
            text = "".join(held)
            continue
        number, at = number + 1, end
        yield f"{path}: row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches()
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, 1))
    except (OSError, ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
