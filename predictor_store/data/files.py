"""Raw rows of a file, a server's records or a Hugging Face dataset, each with its place."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from predictor_store.data import server_records
from predictor_store.data.server_records import MAGIC, MALFORMED, Answered, RequestLog, read_dump

_JSON_SPACE = " \t\r\n"
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
    SGLang's request log or dumps, or a folder of them; a folder that Hugging Face's datasets
    library reads; or a name on its hub. tokenizer: to read prompts of SGLang's records that are
    token ids.
    """
    path = Path(dataset).expanduser()
    try:
        if path.is_file():
            return _file_rows(path, tokenizer)
        if path.is_dir() and (records := [*filter(_is_of_a_server, _files(path))]):
            return itertools.chain.from_iterable(_file_rows(file, tokenizer) for file in records)
    except OSError as error:
        raise DatasetError(f"cannot read {dataset}: {error}") from error
    looks_like_a_path = path.suffix in _SUFFIXES or dataset.startswith(("/", "~", "."))
    if looks_like_a_path and not path.is_dir():
        raise DatasetError(f"there is no file {dataset}")
    return _hub_rows(dataset)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _is_of_a_server(path: Path) -> bool:
    with path.open("rb") as file:
        begins = file.read(_DATE_BYTES)
    is_dump = path.suffix == ".pkl" and begins.startswith(MAGIC)
    return is_dump or server_records.is_line(begins.decode("latin-1"))


def _file_rows(path: Path, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        return _parquet_rows(path)
    if magic[:1] == MAGIC:
        return _dump_rows(path, tokenizer)
    return _json_rows(path, tokenizer, compressed=magic[:2] == _GZIP)


def _dump_rows(path: Path, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        try:
            for place, found in read_dump(file, path, tokenizer):
                yield place, RowError(found) if isinstance(found, str) else _row_of(found)
        except (OSError, ValueError) as error:
            yield str(path), RowError(str(error))


def _row_of(found: Answered) -> dict[str, Any] | RowError:
    """A record of SGLang as a row of a dataset."""
    if found.ids and not found.prompt:
        return RowError("its prompt is token ids: --tokenizer reads them")
    if not found.prompt:
        return RowError("it has no prompt: --log-requests-level 2 as JSON writes it down")
    return {
        "prompt": found.prompt,
        "output_tokens": found.output_tokens,
        "prompt_tokens": found.input_tokens,
        "cap": found.output_tokens if found.is_cut else None,
    }


def _json_rows(path: Path, tokenizer: Any, compressed: bool) -> Iterator[tuple[str, Any]]:
    log = RequestLog(tokenizer)
    # A byte that is no UTF-8 spoils its own row, not the file.
    opener = gzip.open if compressed else open
    with opener(path, "rt", encoding="utf-8-sig", errors="replace") as file:
        line = 0
        try:
            numbered = ((line, text) for line, text in enumerate(file, 1) if text.strip())
            line, text = next(numbered, (0, ""))
            if text.lstrip().startswith("[") and not server_records.is_line(text):
                yield from _array_rows(path, text + file.read(), line)
                return
            rows = itertools.chain([(line, text)] if line else [], numbered)
            for line, text in server_records.without_noise(rows):
                is_line = server_records.is_line(text)
                row = text if is_line else _parse(text)
                if is_line or server_records.is_row(row):
                    row = _logged(log, row)
                    if row is None:
                        continue
                yield f"{path}:{line}", row
        except (OSError, EOFError, zlib.error) as error:
            yield f"{path}:{line + 1}", RowError(f"the file cannot be read on from here: {error}")


def _logged(log: RequestLog, said: str | dict[str, Any]) -> Any:
    """The row of a server's line, or its JSON; None if that tells of no answer."""
    try:
        found = log.of_line(said) if isinstance(said, str) else log.of_row(said)
    except MALFORMED as error:
        return RowError(f"it is not as SGLang writes it ({error!r})")
    return None if found is None else _row_of(found)


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
