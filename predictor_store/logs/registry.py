"""Lists all formats, and recognises the format of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from predictor_store.logs.declared import formats
from predictor_store.logs.fields import parsed
from predictor_store.logs.format import Format
from predictor_store.logs.formats import (
    bench_serving,
    claude_code,
    genai_perf,
    openai_batch,
    openai_chat,
    otel,
    sglang,
    shadow,
    table,
    weka,
)

_READERS = {
    "bench-serving": bench_serving.READER,
    "claude-code": claude_code.READER, "genai-perf": genai_perf.READER,
    "openai-batch": openai_batch.OUTPUT,
    "openai-batch-input": openai_batch.INPUT, "openai-chat": openai_chat.READER,
    "otel": otel.READER, "sglang": sglang.READER, "sglang-export": sglang.EXPORTED,
    "shadow": shadow.READER, "table": table.READER, "weka": weka.READER,
}  # fmt: skip
# If several formats recognise a row, the first one reads it.
FORMATS = tuple(formats(_READERS))
BY_NAME = {each.name: each for each in FORMATS}
# The names of objects and lists that exports put around rows.
_AROUND = (
    "row", "_source", "hits", "event", "standard_logging_object", "record", "log", "json",
    "jsonPayload", "data", "value", "attributes", "message",
)  # fmt: skip
_MOST_LEVELS = 4


def format_of(row: Mapping[str, Any]) -> Format | None:
    """Return the first format that recognises the row."""
    return next((each for each in FORMATS if each.recognizes(row)), None)


def rows_within(row: Mapping[str, Any], wanted: Format | None = None, level: int = 0) -> list[Any]:
    """Return the row. If no format recognises it, return the rows inside it, which exports put into
    a list or an object. In a list with rows of a format, all elements are returned, so that damaged
    ones are counted.

    wanted: the only format to look for; None for all.
    """

    def is_known(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return wanted.recognizes(value) if wanted else format_of(value) is not None

    if is_known(row) or level == _MOST_LEVELS:
        return [row]
    found: list[Any] = []
    for name, value in row.items():
        if name in _AROUND:  # exports may write a row as text
            value = parsed(value)
        values = value if isinstance(value, list) else [value] if name in _AROUND else []
        inner = [
            each
            for one in values
            for each in (rows_within(one, wanted, level + 1) if isinstance(one, Mapping) else [one])
        ]
        if any(map(is_known, inner)):
            found += inner
    return found or [row]


def detected(rows: Iterable[Any]) -> Format | None:
    """Return the format of most of these rows."""
    votes = Counter[str]()
    for row in rows:
        if isinstance(row, Mapping):
            for each in rows_within(row)[:100]:
                if isinstance(each, Mapping) and (found := format_of(each)):
                    votes[found.name] += 1
    return BY_NAME[votes.most_common(1)[0][0]] if votes else None
