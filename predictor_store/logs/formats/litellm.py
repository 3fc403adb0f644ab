"""Reads LiteLLM's spend logs and its StandardLoggingPayload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import NoRequestError, RowError
from predictor_store.logs.fields import Row, parsed, value_at
from predictor_store.logs.format import Context, Format
from predictor_store.logs.messages import answer_of, cap_of, prompt_of, was_cut
from predictor_store.logs.request import LoggedRequest

_ANSWERS = ("completion", "responses", "anthropic_messages", "generate", "text")
_MARKS = ("call_type", "spend", "response_cost", "api_key", "model_group", "litellm_call_id")


def _is_log(row: Mapping[str, Any]) -> bool:
    return "startTime" in row and "completion_tokens" in row and any(m in row for m in _MARKS)


def _read(row: Row, context: Context) -> LoggedRequest:
    kind = str(row.data.get("call_type") or "completion")
    if not any(part in kind for part in _ANSWERS):
        raise NoRequestError
    status = str(value_at(row.data, "status") or value_at(row.data, "metadata.status"))
    if status.lower() in ("failure", "failed", "error") or row.data.get("error_str"):
        raise RowError("that failed", str(row.data.get("error_str") or status)[:80])
    if str(row.data.get("cache_hit")).lower() == "true":
        raise RowError("that a cache answered", "no server saw it")
    end = row.find("end", "endTime")
    response = parsed(row.data.get("response"))
    return LoggedRequest(
        arrival=context.clock.read(row.find("arrival", "startTime"), "s"),
        end=None if end is None else context.clock.read(end, "s"),
        input_tokens=row.tokens("input", "prompt_tokens"),
        output_tokens=row.tokens("output", "completion_tokens"),
        cap_tokens=cap_of(row, "model_parameters", "proxy_server_request", "optional_params"),
        is_cut=was_cut(value_at(response, "choices.0.finish_reason")),
        prompt=prompt_of(
            value_at(row.data, "messages") or value_at(row.data, "proxy_server_request") or ""
        ),
        output=answer_of(response) if response else None,
        session=row.session("session_id", "metadata.session_id", "trace_id"),
    )


FORMAT = Format(
    "litellm",
    "LiteLLM's spend logs, and its StandardLoggingPayload; dates without a zone are in UTC",
    '{"request_id": "x", "call_type": "acompletion", "startTime": "2026-09-21T14:13:20.097Z", '
    '"endTime": "2026-09-21T14:13:22.3Z", "prompt_tokens": 305, "completion_tokens": 157, '
    '"session_id": "s"}',
    "arrivals, lengths, prompts if they are stored, sessions",
    _is_log,
    _read,
)
