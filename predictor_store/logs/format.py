"""Defines the parts of a log format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from predictor_store.logs.clock import Clock
from predictor_store.logs.fields import Row
from predictor_store.logs.request import LoggedRequest


@dataclass(slots=True)
class Context:
    """The state that a format needs in addition to the row.

    clock: reads the file's times.
    tokenizer: decodes token ids; None if there is none.
    asked: by id, the requests of all files so far whose answers are in other rows or files.
    held: requests that later rows may complete; they follow the file's last row.
    notes: remarks on the whole file, shown to the user.
    """

    clock: Clock
    tokenizer: Any = None
    asked: dict[str, LoggedRequest] = field(default_factory=dict)
    held: dict[str, LoggedRequest] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)


class Reader(NamedTuple):
    """The code that a format needs in addition to its entry in formats.toml.

    read: returns the request of a record, None if it is held; raises RowError, NoRequestError or
        MALFORMED.
    recognizes: whether a row is of this format.
    records: yields the records of a row, each with one request, if a row may have several. A record
        that is no mapping is left out.

    If one is None, the entry says it.
    """

    read: Callable[[Row, Context], LoggedRequest | None] | None = None
    recognizes: Callable[[Mapping[str, Any]], bool] | None = None
    records: Callable[[Mapping[str, Any]], Iterable[Any]] | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of logs or data sets.

    name: its name for --format.
    title: what writes it and how to get it, shown to the user.
    example: one row.
    gives: the facts that it contains, shown to the user.
    recognizes: whether a row is of this format.
    read, records: see Reader.
    """

    name: str
    title: str
    example: str
    gives: str
    recognizes: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Row, Context], LoggedRequest | None]
    records: Callable[[Mapping[str, Any]], Iterable[Any]]
