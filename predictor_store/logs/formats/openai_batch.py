"""Reads files of OpenAI's batch API, which batch runners of vLLM and SGLang use too, and results of
Anthropic's batch API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import NoRequestError, RowError
from predictor_store.logs.fields import Row, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.formats.openai_chat import answered
from predictor_store.logs.messages import cap_of, prompt_of
from predictor_store.logs.request import LoggedRequest

_NOTE = "the prompts of a batch are in its input file: name both files to have them"


def _is_input(row: Mapping[str, Any]) -> bool:
    return "custom_id" in row and isinstance(row.get("body", row.get("params")), Mapping)


def _read_input(row: Row, context: Context) -> LoggedRequest:
    body = row.data.get("body", row.data.get("params"))
    context.asked[str(row.data["custom_id"])] = LoggedRequest(
        prompt=prompt_of(body), cap_tokens=cap_of(row, "body", "params")
    )
    raise NoRequestError


def _read_output(row: Row, context: Context) -> LoggedRequest:
    status = value_at(row.data, "response.status_code") or 200
    outcome = value_at(row.data, "result.type") or "succeeded"
    if row.data.get("error") or status >= 400 or outcome != "succeeded":
        raise RowError("that failed", str(row.data.get("error") or status)[:80])
    body = value_at(row.data, "response.body") or value_at(row.data, "result.message") or {}
    request = answered(row, body, "response.body" if "response" in row.data else "result.message")
    created = row.find("arrival", "response.body.created", "response.body.created_at")
    if created is not None:
        request.arrival = context.clock.read(created, "s")
    if asked := context.asked.get(str(row.data["custom_id"])):
        request.prompt, request.cap_tokens = asked.prompt, asked.cap_tokens
    else:
        context.notes.add(_NOTE)
    return request


INPUT = Reader(_read_input, recognizes=_is_input)
OUTPUT = Reader(_read_output)
