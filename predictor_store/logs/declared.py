"""Reads formats.toml, which describes every format, and declares the formats that need no code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from predictor_store.logs import conversations
from predictor_store.logs.errors import NoRequestError, RowError
from predictor_store.logs.fields import Row, parsed, plain_name, value_at
from predictor_store.logs.format import Context, Format, Reader
from predictor_store.logs.messages import answer_of, cap_of, prompt_of, usage_tokens, was_cut
from predictor_store.logs.request import LoggedRequest

_FILE = Path(__file__).with_name("formats.toml")
# The field that a record gets for the place of its list.
_LIST = "sage_list"
_SEEN = LoggedRequest()
# A prompt of fewer blocks does not show the size of a block.
_LEAST_BLOCKS = 4


def formats(readers: Mapping[str, Reader]) -> Iterator[Format]:
    """Yield the formats in the order of formats.toml. readers: the code of some, by name."""
    for name, entry in tomllib.loads(_FILE.read_text("utf-8")).items():
        declared = _Declared(entry)
        code = readers.get(name, Reader())
        about = name, entry["title"], entry["example"], entry["gives"]
        recognizes = code.recognizes or declared.recognizes
        yield Format(
            *about, recognizes, code.read or declared.reader, code.records or declared.records
        )


class _Declared:
    """A format, by its entry in formats.toml."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._entry = entry
        self._is_chat = entry.get("is_chat", False)
        self.reader: Callable[[Row, Context], LoggedRequest] = (
            conversations.read if self._is_chat else self.read
        )

    def recognizes(self, row: Mapping[str, Any]) -> bool:
        is_named = all(
            any(_is_at(row, path) for path in paths.split(" | "))
            for paths in self._entry.get("has", ())
        )
        is_it = is_named and all(_matches(row, *each) for each in self._patterns("is"))
        return is_it and (not self._is_chat or bool(conversations.chat_of(row)))

    def records(self, row: Mapping[str, Any]) -> Iterator[Any]:
        lists = self._entry.get("lists")
        for path in lists or ():
            for each in _elements(row, path):
                yield {**each, _LIST: path} if isinstance(each, Mapping) else each
        if lists is None:
            yield row

    def read(self, row: Row, context: Context) -> LoggedRequest:
        """Return the request of a record. Raises RowError, NoRequestError."""
        entry, data = self._entry, row.data
        if any(_matches(data, *each) for each in self._patterns("skip")):
            raise NoRequestError
        if entry.get("needs_output") and self._lengths(row)[1] is None:
            raise NoRequestError
        for path, pattern in self._patterns("failed"):
            if _matches(data, path, pattern):
                raise RowError("that failed", f"{path} is {value_at(data, path)!r:.60}")
        input_tokens, output_tokens = self._lengths(row)
        if "once" in entry:
            once = row.text(*entry["once"])
            if once and once in context.asked:
                raise NoRequestError
            context.asked[once] = _SEEN
        prompt, answer = (parsed(row.find(of, *entry.get(of, ()))) for of in ("prompt", "answer"))
        has_session = "session_if" not in entry or _is_at(data, entry["session_if"])
        request = LoggedRequest(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            output=answer_of(answer) if answer else None,
            cap_tokens=cap_of(row, *entry["caps_in"]) if "caps_in" in entry else None,
            is_cut=was_cut(parsed(row.find("finish", *entry.get("finish", ())))),
            prompt=prompt_of(prompt) if prompt else "",
            ttlt_s=row.seconds(
                "time to last token", *entry.get("ttlt", ()), unit=entry.get("ttlt_unit", "s")
            ),
            session=row.session(*entry.get("session", ())) if has_session else "",
            id=row.text(*entry.get("id", ())),
            parent=row.text(*entry.get("parent", ())),
            pause_s=row.seconds("pause", *entry.get("pause_ms", ()), unit="ms"),
        )
        request.blocks, request.block_tokens = self._blocks(row, input_tokens)
        request.arrival, request.end = (self._time(row, of, context) for of in ("arrival", "end"))
        if request.arrival is None and request.end is not None and request.ttlt_s is not None:
            request.arrival = request.end - request.ttlt_s
        return request

    def _time(self, row: Row, meaning: str, context: Context) -> float | None:
        for path in self._entry.get(meaning, ()):
            if (value := row.find(meaning, path)) is not None:
                unit = plain_name(path.rpartition(".")[2])[1]
                unit = unit or self._entry.get("time_unit")
                return context.clock.read(value, unit, self._entry.get("usual_unit", ""))
        return None

    def _blocks(self, row: Row, input_tokens: int | None) -> tuple[tuple[int, ...], int]:
        """Return the blocks of a prompt, and the tokens of one: by the row, or else the usual size
        unless the prompt's length shows another power of two."""
        blocks = tuple(map(int, parsed(row.find("blocks", *self._entry.get("blocks", ()))) or ()))
        if not blocks:
            return (), 0
        usual = self._entry.get("usual_block_tokens")
        if usual is None:
            return blocks, row.tokens("block size", *self._entry.get("block_tokens", ())) or 0
        if input_tokens is not None and len(blocks) >= _LEAST_BLOCKS:
            least = -(-input_tokens // len(blocks))
            if not usual < 2 * least < 3 * usual:
                return blocks, 1 << (least - 1).bit_length()
        return blocks, usual

    def _patterns(self, key: str) -> Iterator[tuple[str, str]]:
        yield from self._entry.get(key, {}).items()

    def _lengths(self, row: Row) -> tuple[int | None, int | None]:
        """Return input and output tokens: those of a usage object before those of single fields."""
        tokens = usage_tokens(row.find("output", *self._entry.get("usage", ())))
        if tokens[0] is not None:
            row.used("input", row.usage["output"])
        of_fields = [self._tokens(row, of) for of in ("input", "output")]
        found = [each if one is None else one for one, each in zip(tokens, of_fields, strict=True)]
        return found[0], found[1]

    def _tokens(self, row: Row, meaning: str) -> int | None:
        """Return the first field with the tokens. A field after a + is added if it is there."""
        for paths in self._entry.get(meaning, ()):
            first, *others = paths.split(" + ")
            if (tokens := row.tokens(meaning, first)) is not None:
                return tokens + sum(row.tokens("", path) or 0 for path in others)
        return None


def _is_at(data: Any, path: str) -> bool:
    return path in data or value_at(data, path) is not None


def _matches(data: Any, path: str, pattern: str) -> bool:
    """Whether the whole value at the path matches, as text: "" for a missing one, 0 or false."""
    value = value_at(data, path) or ""
    return re.fullmatch(pattern, str(value), re.IGNORECASE | re.DOTALL) is not None


def _elements(data: Any, path: str) -> Iterator[Any]:
    """Yield the elements of the lists at a path, in which * stands for any element of a list."""
    before, star, after = path.partition(".*.")
    found = value_at(data, before)
    for each in found if isinstance(found, list) else ():
        if star:
            yield from _elements(each, after)
        else:
            yield each
