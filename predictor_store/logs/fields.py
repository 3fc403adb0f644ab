"""Finds the fields of a row by any of the names that tools give them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from predictor_store.logs.clock import UNITS
from predictor_store.logs.errors import RowError

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_UNIT_WORDS = {
    **{unit: unit for unit in UNITS}, "sec": "s", "secs": "s", "second": "s", "seconds": "s",
    "msec": "ms", "millis": "ms", "milliseconds": "ms", "micros": "us", "microseconds": "us",
    "nano": "ns", "nanos": "ns", "nanoseconds": "ns", "unixnano": "ns",
}  # fmt: skip
# No model has a longer context.
_MOST_TOKENS = 10**8


class Row:
    """A row of a log. usage: the field that was taken for each meaning in any row."""

    def __init__(self, data: Mapping[str, Any], usage: dict[str, str]) -> None:
        self.data = data
        self.usage = usage

    def find(self, meaning: str, *paths: str) -> Any:
        """Return the first of these fields that has a value; None if none has. Dots lead into
        objects."""
        for path in paths:
            value = value_at(self.data, path)
            if value is not None:
                if meaning:
                    self.usage.setdefault(meaning, path)
                return value
        return None

    def tokens(self, meaning: str, *paths: str) -> int | None:
        """Return the first of these fields as a number of tokens. Raises RowError."""
        value = self.find(meaning, *paths)
        return None if value is None else whole(value, meaning)

    def cap(self, *paths: str) -> int | None:
        """Return the first of these fields as the cap of an answer. Raises RowError."""
        value = self.find("cap", *paths)
        return None if value is None else cap(value, "cap")

    def seconds(self, meaning: str, *paths: str, unit: str = "s") -> float | None:
        """Return the first of these fields as a duration in seconds. Raises RowError."""
        value = self.find(meaning, *paths)
        return None if value is None else duration_s(value, meaning, unit)

    def text(self, *paths: str) -> str:
        """Return the first of these fields as a name; "" if there is none."""
        value = self.find("", *paths)
        return "" if value is None else str(value)

    def session(self, *paths: str) -> str:
        """Return the first of these fields as a session's name; "" if there is none."""
        value = self.find("session", *paths)
        return "" if value is None else str(value)

    def used(self, meaning: str, name: str) -> None:
        self.usage.setdefault(meaning, name)


def value_at(data: Any, path: str) -> Any:
    """Return the value at a path; None if it is missing or empty. In the path, * stands for the
    first key or element with a value."""
    if isinstance(data, Mapping) and path in data:
        value = data[path]
    elif path == "*" or path.startswith("*."):
        values = data.values() if isinstance(data, Mapping) else data
        found = (value_at(each, path[2:]) for each in values or ()) if path[2:] else values
        return next((each for each in found if each is not None), None)
    elif "." in path:
        head, _, rest = path.partition(".")
        inner = data.get(head) if isinstance(data, Mapping) else None
        if isinstance(inner, list) and rest.partition(".")[0].isdigit():
            number, _, rest = rest.partition(".")
            inner = inner[int(number)] if int(number) < len(inner) else None
            return value_at(inner, rest) if rest else inner
        return value_at(parsed(inner), rest) if inner is not None else None
    else:
        return None
    is_nan = isinstance(value, float) and value != value
    # Langfuse shows a missing cap as "Infinity".
    return None if value in ("", "Infinity") or is_nan else value


def parsed(value: Any) -> Any:
    """Parse an object or array inside a text. Return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[", '"')):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def whole(value: Any, name: str) -> int:
    """Return a value as a number of tokens. Raises RowError if it is none."""
    number = _number(value)
    if isinstance(value, bool) or not 0 <= number < _MOST_TOKENS or number != number // 1:
        raise RowError("with a malformed number of tokens", f"{name} is {value!r:.60}")
    return int(number)


def cap(value: Any, name: str) -> int:
    """Return a value as the cap of an answer, 0 if it is longer than any answer. Raises RowError if
    it is none."""
    return 0 if _number(value) >= _MOST_TOKENS else whole(value, name)


def _number(value: Any) -> float:
    """Return a value as a number, -1 if it is none. A table gives a column with gaps as floats, and
    CSV gives texts."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return -1.0


def duration_s(value: Any, name: str, unit: str) -> float:
    """Return a value as a duration in seconds. Raises RowError if it is none."""
    number = _number(value) * UNITS[unit]
    if isinstance(value, bool) or not 0 <= number < 1e9:
        raise RowError("with a malformed time", f"{name} is {value!r:.60}")
    return number


@functools.lru_cache(10_000)
def plain_name(name: str) -> tuple[str, str | None]:
    """Return a field's name without case, marks and unit, and the unit if the name ends in one."""
    words = [word.lower() for word in _WORD.findall(name)]
    unit = _UNIT_WORDS.get(words[-1]) if len(words) > 1 else None
    return "".join(words[:-1] if unit else words), unit
