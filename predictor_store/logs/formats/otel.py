"""Reads OpenTelemetry spans with `gen_ai` attributes: OTLP JSON, Jaeger's JSON or flat rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from predictor_store.logs.clock import Clock
from predictor_store.logs.errors import NoRequestError, RowError
from predictor_store.logs.fields import Row, parsed, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import answer_of, prompt_of, was_cut
from predictor_store.logs.request import LoggedRequest

_ATTRIBUTES = ("attributes", "tags", "SpanAttributes", "span_attributes", "Attributes")
_STARTS = (
    "startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime", "start", "Timestamp",
    "timestamp",
)  # fmt: skip
_ENDS = ("endTimeUnixNano", "end_time_unix_nano", "end_time", "endTime", "end")
_SPAN_IDS = (
    "spanId",
    "span_id",
    "SpanId",
    "spanID",
    "context",
    "traceId",
    "trace_id",
    *_STARTS[:2],
)
_TRACES = ("traceId", "trace_id", "TraceId", "traceID", "context.trace_id")
_INPUTS = (
    "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens",
    "llm.token_count.prompt", "ai.usage.inputTokens", "ai.usage.promptTokens",
)  # fmt: skip
_OUTPUTS = (
    "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens",
    "llm.token_count.completion", "ai.usage.outputTokens", "ai.usage.completionTokens",
)  # fmt: skip
_PROMPTS = ("gen_ai.input.messages", "gen_ai.prompt", "input.value", "ai.prompt.messages")
_ANSWERS = ("gen_ai.output.messages", "gen_ai.completion", "output.value", "ai.response.text")
# Spans of these operations repeat the usage of the calls inside them, or generate no tokens.
_OTHERS = {"embeddings", "execute_tool", "invoke_agent", "create_agent", "invoke_workflow"}


def _is_trace(row: Mapping[str, Any]) -> bool:
    return any(isinstance(span, Mapping) for span in _spans_of(row)) or any(
        _names_usage(name) for name in row
    )


def _names_usage(name: str) -> bool:
    return name.removeprefix("attributes.") in _OUTPUTS or name == "gen_ai"


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


def _read(span: Row, context: Context) -> LoggedRequest:
    attributes = Row(_attributes_of(span.data), span.usage)
    if attributes.find("output", *_OUTPUTS) is None or _is_other(attributes):
        raise NoRequestError
    if _failed(span.data):
        raise RowError("that failed", str(span.data.get("status"))[:80])
    start, end = (_time(span, meaning, names, context.clock) for meaning, names in _BOUNDS)
    reasons = attributes.find("finish", "gen_ai.response.finish_reasons")
    return LoggedRequest(
        arrival=start,
        end=end,
        input_tokens=attributes.tokens("input", *_INPUTS),
        output_tokens=attributes.tokens("output", *_OUTPUTS),
        cap_tokens=attributes.cap("gen_ai.request.max_tokens", "llm.request.max_tokens"),
        is_cut=was_cut(parsed(reasons)),
        prompt=prompt_of(attributes.find("prompt", *_PROMPTS) or _numbered(attributes.data)),
        output=answer_of(attributes.find("answer", *_ANSWERS)),
        session=attributes.session("gen_ai.conversation.id", "session.id")
        or span.session(*_TRACES),
    )


_BOUNDS = (("arrival", _STARTS), ("end", _ENDS))


def _time(span: Row, meaning: str, names: tuple[str, ...], clock: Clock) -> float | None:
    value = span.find(meaning, *names)
    if isinstance(value, list) and len(value) == 2:  # JavaScript writes seconds and nanoseconds
        return clock.read(float(value[0]) + float(value[1]) / 1e9, "s")
    is_nano = any(span.data.get(name) is not None for name in names[:2])
    return None if value is None else clock.read(value, "ns" if is_nano else None)


def _attributes_of(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes by their full names, in whichever form the span has them."""
    found = {name.removeprefix("attributes."): value for name, value in span.items()}
    for place in _ATTRIBUTES:
        of = parsed(span.get(place))
        if isinstance(of, Mapping):
            found.update(of)
        for each in of if isinstance(of, list) else ():
            if isinstance(each, Mapping) and "key" in each:
                found[each["key"]] = _value(each.get("value"))
    return found


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


def _is_other(attributes: Row) -> bool:
    kind = value_at(attributes.data, "openinference.span.kind") or "LLM"
    # Vercel's AI SDK wraps each call in a second span that repeats its usage.
    operation = attributes.text("ai.operationId")
    is_around = bool(operation) and not operation.endswith(("doGenerate", "doStream"))
    return attributes.text("gen_ai.operation.name") in _OTHERS or kind != "LLM" or is_around


def _failed(span: Mapping[str, Any]) -> bool:
    status = span.get("status", span.get("StatusCode"))
    code = value_at(status, "code") or value_at(status, "status_code") or status
    return code == 2 or str(code).upper().endswith("ERROR")


READER = Reader(_read, recognizes=_is_trace, records=lambda row: [*_spans_of(row)] or [row])
