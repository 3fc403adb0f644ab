"""Raw rows of a file, a server's log or a Hugging Face dataset, each with its place."""

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
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".gz")


class DatasetError(Exception):
    """The dataset cannot be read at all; the message names it and says why."""


class RowError(Exception):
    """One row is of no use; the message says why."""


def raw_rows(dataset: str, tokenizer: Any = None) -> Iterator[tuple[str, Any]]:
    """(place, row) for each row; place is "file:line" or "dataset:row number", from 1. The row is
    a RowError if it cannot be read. Raises DatasetError.

    dataset: a file of JSON lines, a JSON array or Parquet, recognised by its content, gzip too;
    SGLang's request log, or a folder of them; a folder that Hugging Face's datasets library reads;
    or a name on its hub. tokenizer: see server_records.read_line.
    """
    path = Path(dataset).expanduser()
    try:
        if path.is_file():
            return _file_rows(path, tokenizer)
        if path.is_dir() and (logs := [*filter(_is_log, sorted(path.rglob("*")))]):
            return itertools.chain.from_iterable(_file_rows(file, tokenizer) for file in logs)
    except OSError as error:
        raise DatasetError(f"cannot read {dataset}: {error}") from error
    looks_like_a_path = path.suffix in _SUFFIXES or dataset.startswith(("/", "~", "."))
    if looks_like_a_path and not path.is_dir():
        raise DatasetError(f"there is no file {dataset}")
    return _hub_rows(dataset)


def _is_log(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return server_records.is_line(file.read(_DATE_BYTES).decode("latin-1"))


def _file_rows(path: Path, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        return _hub_rows("parquet", str(path))
    return _json_rows(path, tokenizer, compressed=magic[:2] == _GZIP)


def _row_of(found: Answered) -> dict[str, Any] | RowError:
    """A record of SGLang as a row of a dataset."""
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


def _hub_rows(name: str, file: str | None = None) -> Iterator[tuple[str, Any]]:
    """Rows of a dataset that Hugging Face's library loads by name, or from a file of that form."""
    import datasets

    try:
        if Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, data_files=file)
    # The library raises whatever its layers raise: connection, file system, value errors, its own.
    except Exception as error:
        raise DatasetError(
            f"cannot load the dataset {file or name}: {type(error).__name__}: {error}. It is "
            "neither a file here nor a dataset that Hugging Face's library can load; without a "
            "network, give the path of a downloaded file"
        ) from error
    if isinstance(loaded, dict):
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    for number, row in enumerate(loaded, start=1):
        yield f"{file or name}:{number}", row
