"""Finds OpenTelemetry's spans in OTLP JSON, Jaeger's JSON or flat rows; formats.toml names their
`gen_ai` attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from predictor_store.logs.fields import parsed
from predictor_store.logs.format import Reader

_ATTRIBUTES = ("attributes", "tags", "SpanAttributes", "span_attributes", "Attributes")
_SPAN_IDS = (
    "spanId", "span_id", "SpanId", "spanID", "context", "traceId", "trace_id", "startTimeUnixNano",
    "start_time_unix_nano",
)  # fmt: skip
# The names of a flat row's fields that have the length of an answer.
_USAGE = re.compile(
    r"(attributes[.])?(gen_ai|(gen_ai|llm|ai)[.](usage|token_count)[.](output|completion)"
    r"(_tokens|Tokens)?)"
)


def _is_trace(row: Mapping[str, Any]) -> bool:
    """Whether a row has spans, or is a flat one."""
    return any(isinstance(span, Mapping) for span in _spans_of(row)) or any(
        map(_USAGE.fullmatch, row)
    )


def _records(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield each span with its attributes as fields."""
    for span in [*_spans_of(row)] or [row]:
        yield _with_attributes(span) if isinstance(span, Mapping) else span


def _spans_of(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the spans of an OTLP batch or of a trace, or the row itself if it is a span. Elements
    that are no objects are yielded as they are."""
    for name in ("resourceSpans", "resource_spans", "scopeSpans", "scope_spans", "spans"):
        if isinstance(row.get(name), list):
            for inner in row[name]:
                yield from _spans_of(inner) if isinstance(inner, Mapping) else [inner]
            return
    has_attributes = any(isinstance(parsed(row.get(name)), Mapping | list) for name in _ATTRIBUTES)
    if has_attributes and any(name in row for name in _SPAN_IDS):
        yield row


def _with_attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return the span's own fields and its attributes, in any of their forms, by full names."""
    found = {name.removeprefix("attributes."): _time(value) for name, value in span.items()}
    for place in _ATTRIBUTES:
        of = parsed(span.get(place))
        if isinstance(of, Mapping):
            found.update(of)
        for each in of if isinstance(of, list) else ():
            if isinstance(each, Mapping) and "key" in each:
                found[each["key"]] = _value(each.get("value"))
    if messages := _numbered(found):
        found.setdefault("gen_ai.prompt", messages)
    return found


def _time(value: Any) -> Any:
    """Return seconds for the seconds and nanoseconds that JavaScript writes, and anything else
    unchanged."""
    if isinstance(value, list) and len(value) == 2 and {*map(type, value)} <= {int, float}:
        return value[0] + value[1] / 1e9
    return value


def _value(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    inner = next((each for each in value.values() if each is not None), None)
    if isinstance(inner, Mapping) and isinstance(inner.get("values"), list):
        return [_value(each) for each in inner["values"]]
    return inner


def _numbered(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a prompt whose roles and contents are in numbered attributes."""
    messages = list[dict[str, Any]]()
    while (content := attributes.get(f"gen_ai.prompt.{len(messages)}.content")) is not None:
        role = attributes.get(f"gen_ai.prompt.{len(messages)}.role", "user")
        messages.append({"role": role, "content": content})
    return messages


READER = Reader(recognizes=_is_trace, records=_records)
