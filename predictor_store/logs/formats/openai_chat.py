"""Reads records of chats and completions in the form of OpenAI's API: a request with its response,
or messages with their usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row, parsed, plain_name, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.formats import table
from predictor_store.logs.messages import (
    answer_of,
    cap_of,
    first_exchange,
    last_exchange,
    num_answers,
    prompt_of,
    usage_tokens,
    was_cut,
)
from predictor_store.logs.request import LoggedRequest

_REQUESTS = ("request", "request_body", "requestBody", "body", "params", "kwargs", "req", "input")
_RESPONSES = ("response", "response_body", "responseBody", "completion", "result", "res", "output")
_USAGES = ("usage", "usageMetadata", "usage_metadata", "token_usage")
_REASONS = ("choices.0.finish_reason", "stop_reason", "finish_reason", "incomplete_details")


def _part(row: Mapping[str, Any], names: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    """Return the name of the field whose object has one of these fields; "" if there is none."""
    for name in names:
        value = parsed(row.get(name))
        if isinstance(value, Mapping) and any(value.get(each) is not None for each in wanted):
            return name
    return ""


def _request_field(row: Mapping[str, Any]) -> str:
    return _part(row, _REQUESTS, ("messages", "prompt", "input", "contents"))


def _response_field(row: Mapping[str, Any]) -> str:
    return _part(row, _RESPONSES, ("choices", "usage", "output", "content", *_USAGES))


def _is_record(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("messages"), list) or isinstance(row.get("choices"), list):
        return True
    has_usage = any(isinstance(parsed(row.get(name)), Mapping) for name in _USAGES)
    return has_usage or bool(_response_field(row))


def _read(row: Row, context: Context) -> LoggedRequest:
    data = row.data
    asked, response_field = _request_field(data), _response_field(data)
    response = parsed(data[response_field]) if response_field else data
    if data.get("error"):
        raise RowError("that failed", str(data["error"])[:80])
    request = answered(row, response, response_field)
    if request.output_tokens is None and response_field:  # usage is outside the response
        of_row = answered(row, data, "")
        request.input_tokens, request.output_tokens = of_row.input_tokens, of_row.output_tokens
    if request.output_tokens is None:
        request.input_tokens, request.output_tokens = table.recorded_lengths(row)
    chat = parsed(value_at(data, f"{asked}.messages" if asked else "messages"))
    if isinstance(chat, list):
        # A row without lengths belongs to a data set, and is read like other conversations.
        exchange = first_exchange if _is_data_set(data, request) else last_exchange
        request.prompt, answer = exchange(chat)
        request.output = answer if request.output is None else request.output
    else:
        request.prompt = prompt_of(data[asked] if asked else _own_prompt(data))
    request.cap_tokens = cap_of(row, *(place for place in (asked, "") if place or not asked))
    times = table.read(Row(_times_of(data, response), row.usage), context)
    request.arrival, request.end, request.ttlt_s = times.arrival, times.end, times.ttlt_s
    request.session = times.session
    return request


def _is_data_set(row: Mapping[str, Any], request: LoggedRequest) -> bool:
    return request.output_tokens is None and request.output is None


def _own_prompt(row: Mapping[str, Any]) -> Any:
    return next((row[name] for name in ("prompt", "input", "contents") if row.get(name)), "")


def answered(row: Row, response: Any, place: str) -> LoggedRequest:
    """Return a request with a response's answer. place: the path of the response in the row."""
    for name in _USAGES:
        if (usage := value_at(response, name)) is not None:
            num_in, num_out = usage_tokens(usage)
            for meaning in ("input", "output"):
                row.used(meaning, f"{place}.{name}" if place else name)
            break
    else:
        num_in = num_out = None
    reasons = (value_at(response, path) for path in _REASONS)
    return LoggedRequest(
        input_tokens=num_in,
        output_tokens=None if num_out is None else round(num_out / num_answers(response)),
        output=answer_of(response) if place or "choices" in response else None,
        is_cut=any(was_cut(reason) for reason in reasons if reason is not None),
    )


_TIMES = {*table.ARRIVAL, *table.END, *table.TTLT, *table.SESSION}


def _times_of(row: Mapping[str, Any], response: Any) -> dict[str, Any]:
    """Return the fields of a record that give its time, or the response's if it has none of its
    own."""
    own = {name: value for name, value in row.items() if plain_name(name)[0] in _TIMES}
    created = {
        name: response[name]
        for name in ("created", "created_at")
        if isinstance(response, Mapping) and response.get(name)
    }
    return created | own


READER = Reader(_read, recognizes=_is_record)
