"""Reads the requests of files in any of the formats."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from pathlib import Path
from typing import Any

from predictor_store.cached_file import expanded
from predictor_store.logs.clock import Clock
from predictor_store.logs.errors import DatasetError, NoRequestError, RowError
from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Format
from predictor_store.logs.registry import BY_NAME, detected, rows_within
from predictor_store.logs.request import LoggedRequest
from predictor_store.logs.rows import raw_rows
from sage_sched.fields import MALFORMED

# The number of rows from which a format is recognised.
_NUM_LOOKED_AT = 32
_MOST_SEEN = 40
_FILTERED = object()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """A user's options for all files.

    format: the format's name; "" to recognise it.
    time_unit: the unit of times that are plain numbers.
    zone: the zone of dates without one.
    filters: by field, the value that it must have, as text.
    """

    format: str = ""
    time_unit: str | None = None
    zone: tzinfo | None = None
    filters: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """Counts the records of a file, each of which may be a request. A row may have several.

    left_out: the number of records left out, by reason. first: the place and details of the first
        such record, by reason.
    other: records that are no requests.
    filtered: records left out by the user's filters.
    """

    read: int = 0
    used: int = 0
    other: int = 0
    filtered: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def leave_out(self, place: str, error: RowError) -> None:
        self.left_out[error.kind] += 1
        self.first.setdefault(error.kind, f"{place}: {error}")


@dataclass(slots=True)
class Source:
    """One file of requests.

    seen: the names of its fields. used: the field that was taken for each meaning.
    """

    path: str
    format: Format
    context: Context
    filters: Mapping[str, str]
    counts: Counts = field(default_factory=Counts)
    used: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[tuple[str, LoggedRequest]]:
        """Yield (place, request) for all readable requests. Raises DatasetError."""
        for place, raw in raw_rows(self.path):
            for record in self._records_of(raw):
                self.counts.read += 1
                try:
                    if (request := self._request_of(record)) is not None:
                        yield place, request
                except NoRequestError:
                    self.counts.other += 1
                except RowError as error:
                    self.counts.leave_out(place, error)
                except MALFORMED as error:
                    self.counts.leave_out(place, RowError("that are malformed", repr(error)[:120]))

        yield from ((self.path, request) for request in self.context.held.values())

    def _records_of(self, raw: Any) -> Iterator[Any]:
        """Yield records, each of which may be a request, or a RowError."""
        for row in rows_within(raw, self.format) if isinstance(raw, Mapping) else [raw]:
            if not isinstance(row, Mapping):
                yield row
                continue
            if len(self.seen) < _MOST_SEEN:
                self.seen.update(map(str, row))
            is_filtered = any(
                _as_text(row.get(name)) != value for name, value in self.filters.items()
            )
            try:
                for record in self.format.records(row):
                    yield _FILTERED if is_filtered else record
            except MALFORMED as error:
                yield RowError("that are malformed", repr(error)[:120])

    def _request_of(self, record: Any) -> LoggedRequest | None:
        """Return the request; None if it is filtered. Raises RowError, NoRequestError and
        MALFORMED."""
        if record is _FILTERED:
            self.counts.filtered += 1
            return None
        if isinstance(record, RowError):
            raise record
        if not isinstance(record, Mapping):
            raise RowError("that is no JSON object", f"{record!r:.60}")
        return self.format.read(Row(record, self.used), self.context)


class LogReader:
    """Reads files, or all files in folders, in any of the formats.

    skipped: files of folders that are no logs, and the reasons.
    """

    def __init__(
        self, paths: Sequence[str], options: ReadOptions | None = None, tokenizer: Any = None
    ) -> None:
        self.paths = paths
        self.options = options or ReadOptions()
        self.skipped: list[str] = []
        self._tokenizer = tokenizer
        self._asked: dict[str, LoggedRequest] = {}

    def sources(self) -> list[Source]:
        """Return the source of each file, to be read in this order. Raises DatasetError."""
        found = []
        for path in self.paths:
            files = _files_in(path)
            for file in files or [path]:
                try:
                    found.append(self._opened(file))
                except DatasetError as error:
                    if not files:
                        raise
                    self.skipped.append(str(error))
        if not found:
            more = f"; {self.skipped[0]}" if self.skipped else ""
            raise DatasetError(f"{', '.join(self.paths)}: no log found{more}")
        # The answers of a batch are read after its prompts.
        return sorted(found, key=lambda source: source.format.name != "openai-batch-input")

    def _opened(self, path: str) -> Source:
        with contextlib.closing(raw_rows(path)) as rows:
            first = list(itertools.islice(rows, _NUM_LOOKED_AT))
        named = self.options.format
        format_ = BY_NAME[named] if named else detected(row for _, row in first)
        if format_ is None:
            raise DatasetError(_unknown(path, first))
        context = Context(
            Clock(self.options.time_unit, self.options.zone), self._tokenizer, self._asked
        )
        return Source(path, format_, context, self.options.filters)


def _files_in(path: str) -> list[str]:
    """Return the files of a folder, without hidden ones; [] if the path is no folder. Raises
    DatasetError."""
    try:
        folder = expanded(path)
        if not folder.is_dir():
            return []
        found = [
            file
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not any(_is_hidden(part) for part in _parts(file, folder))
        ]
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    if not found:
        raise DatasetError(f"there is no file in {path}")
    return [str(file) for file in found]


def _parts(file: Path, folder: Path) -> tuple[str, ...]:
    return file.relative_to(folder).parts


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _unknown(path: str, first: Sequence[tuple[str, Any]]) -> str:
    if not first:
        return f"{path} is empty"
    seen = {str(name) for _, row in first if isinstance(row, Mapping) for name in row}
    wrong = next((f"; {place}: {row}" for place, row in first if isinstance(row, RowError)), "")
    fields = ", ".join(sorted(seen)[:_MOST_SEEN]) or "none"
    return (
        f"{path} is in no known format (fields seen: {fields}{wrong}). `sage-sched formats` lists "
        "the formats, and --format chooses one. A CSV file must begin with its columns' names; "
        "name yours arrival_s, input_tokens, output_tokens, prompt, output"
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
