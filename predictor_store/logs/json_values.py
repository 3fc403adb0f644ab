"""Reads the JSON values of a text one by one: the elements of an array, or objects in sequence,
each of which may cover several lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# The text before a value of an array, or after the last value.
_BETWEEN = re.compile(r"\s*(\[\s*\]|[\[\],])\s*")
# Characters read at a time.
_CHARS = 2**20
# Longer values are refused.
MOST_CHARS = 2**29
# The longest number or word of JSON. If an error is this near to the end, the number or word there
# may be truncated.
_TOKEN_CHARS = 40


def json_values(pieces: Iterator[str], *, is_array: bool) -> Iterator[Any]:
    """Yield the values, and hold little more than one at a time in memory. Raises ValueError if the
    text is no such JSON."""
    decode = json.JSONDecoder().raw_decode
    text, at, number, is_whole = "", 0, 0, False
    while True:
        try:
            begin, is_end = _begin(text, at, number, is_array)
            if is_end:
                if is_array and (text[begin:] or any(piece.strip() for piece in pieces)):
                    raise ValueError("there is more text after the array")
                if is_array or is_whole:
                    return
            row, end = decode(text, begin)
            if end == len(text) and not is_whole:
                raise json.JSONDecodeError("a number may go on", text, end)
        except (ValueError, RecursionError) as error:
            if len(text) - at > MOST_CHARS:
                raise ValueError(
                    f"value {number + 1} has more than {MOST_CHARS} characters: write JSON "
                    "lines, one row each"
                ) from error
            if is_whole or not _may_go_on(error, text):
                raise ValueError(f"after value {number}: {error}") from error
            text, is_whole = _more(text[at:], pieces)
            at = 0
            continue
        number, at = number + 1, end
        yield row


def _begin(text: str, at: int, number: int, is_array: bool) -> tuple[int, bool]:
    """Return where the next value begins, and whether the text ends there. Raises ValueError."""
    if not is_array:
        begin = len(text) - len(text[at:].lstrip()) if at < len(text) else at
        return begin, begin == len(text)
    between = _BETWEEN.match(text, at)
    mark, begin = (between[1], between.end()) if between else ("", at)
    is_end = mark.endswith("]") and (mark == "]") is (number > 0)
    if not is_end and mark != ("," if number else "["):
        raise json.JSONDecodeError("a comma or bracket is missing", text, at)
    return begin, is_end


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether a text may be malformed only because it is truncated."""
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated string")
        or error.pos >= len(text.rstrip()) - _TOKEN_CHARS
    )


def _more(text: str, pieces: Iterator[str]) -> tuple[str, bool]:
    """Return the text with the next pieces, at least twice as long and at least _CHARS, and whether
    the pieces have ended."""
    held, num_chars, wanted = [text], len(text), max(_CHARS, 2 * len(text))
    for piece in pieces:
        held.append(piece)
        num_chars += len(piece)
        if num_chars >= wanted:
            return "".join(held), False
    return "".join(held), True
