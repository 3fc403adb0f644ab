"""Reads genai-perf's profile export, whose answers are streams of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row, parsed, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import answer_of, cap_of, prompt_of, usage_tokens
from predictor_store.logs.request import LoggedRequest


def _records(row: Mapping[str, Any]) -> Iterator[Any]:
    for experiment in row["experiments"]:
        yield from experiment["requests"]


def _read(row: Row, context: Context) -> LoggedRequest:
    outputs = row.data.get("response_outputs") or ()
    events = [event for output in outputs for event in _events(output.get("response"))]
    error = next((event["error"] for event in events if event.get("error")), None)
    if error or not row.data.get("response_timestamps"):
        raise RowError("that failed", str(error)[:80])
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    num_in, num_out = usage_tokens(usage)
    pieces = [value_at(event, "choices.0.delta.content") or answer_of(event) for event in events]
    payload = parsed(value_at(row.data, "request_inputs.payload") or "")
    return LoggedRequest(
        arrival=context.clock.read(row.find("arrival", "timestamp"), "ns"),
        end=context.clock.read(row.data["response_timestamps"][-1], "ns"),
        input_tokens=num_in,
        output_tokens=num_out,
        output="".join(filter(None, pieces)),
        cap_tokens=cap_of(Row({"payload": payload}, {}), "payload"),
        prompt=prompt_of(payload),
    )


def _events(response: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a piece of a stream, or the whole response."""
    for line in str(response).splitlines():
        event = parsed(line.removeprefix("data:").strip())
        if isinstance(event, Mapping):
            yield event


READER = Reader(_read, records=_records)
