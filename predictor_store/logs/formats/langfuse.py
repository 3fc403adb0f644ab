"""Reads the generations among Langfuse's observations, from its UI, its API or blob storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import NoRequestError, RowError
from predictor_store.logs.fields import Row, parsed, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import answer_of, cap_of, prompt_of, usage_tokens
from predictor_store.logs.request import LoggedRequest

_USAGES = (
    "usageDetails",
    "usage_details",
    "usage",
    "providedUsageDetails",
    "provided_usage_details",
)
_INPUTS = ("promptTokens", "prompt_tokens", "inputUsage", "input_usage", "inputTokens")
_OUTPUTS = ("completionTokens", "completion_tokens", "outputUsage", "output_usage", "outputTokens")
_TYPES = {
    "GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING",
    "GUARDRAIL",
}  # fmt: skip


def _is_observation(row: Mapping[str, Any]) -> bool:
    has_start = "startTime" in row or "start_time" in row
    is_typed = str(row.get("type")).upper() in _TYPES
    is_traced = "traceId" in row or "trace_id" in row
    has_usage = any(name in row for name in (*_USAGES, *_OUTPUTS))
    return has_start and (is_typed or (is_traced and has_usage))


def _read(row: Row, context: Context) -> LoggedRequest:
    if str(row.data.get("type") or "GENERATION").upper() != "GENERATION":
        raise NoRequestError
    if str(row.data.get("level")).upper() == "ERROR":
        raise RowError("that failed", str(row.data.get("statusMessage"))[:80])
    num_in, num_out = usage_tokens(row.find("output", *_USAGES))
    if num_in is not None:
        row.used("input", row.usage["output"])
    end = row.find("end", "endTime", "end_time")
    return LoggedRequest(
        arrival=context.clock.read(row.find("arrival", "startTime", "start_time")),
        end=None if end is None else context.clock.read(end),
        input_tokens=row.tokens("input", *_INPUTS) if num_in is None else num_in,
        output_tokens=row.tokens("output", *_OUTPUTS) if num_out is None else num_out,
        cap_tokens=_cap(row),
        prompt=prompt_of(row.data.get("input")),
        output=answer_of(parsed(row.data.get("output"))),
        session=row.session("sessionId", "session_id", "traceId", "trace_id"),
    )


def _cap(row: Row) -> int | None:
    places = ("modelParameters", "model_parameters")
    names = [f"{place}.{name}" for place in places for name in ("maxTokens", "max_tokens")]
    value = next((found for name in names if (found := value_at(row.data, name))), None)
    is_number = str(value).isdigit()  # Langfuse shows a missing one as "Infinity"
    return int(str(value)) if is_number else cap_of(row, "input") if not value else None


READER = Reader(_read, recognizes=_is_observation)
