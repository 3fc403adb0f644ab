"""Reads inference-perf's per_request_lifecycle_metrics.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row, parsed
from predictor_store.logs.format import Context, Format
from predictor_store.logs.messages import answer_of, cap_of, prompt_of
from predictor_store.logs.request import LoggedRequest


def _is_record(row: Mapping[str, Any]) -> bool:
    return {"start_time", "end_time", "request", "info"} <= row.keys()


def _read(row: Row, context: Context) -> LoggedRequest:
    if row.data.get("error"):
        raise RowError("that failed", str(row.data["error"])[:80])
    request, response = parsed(row.data["request"]), parsed(row.data.get("response"))
    row.used("arrival", "start_time")
    return LoggedRequest(
        arrival=context.clock.read(row.data["start_time"], "s"),
        end=context.clock.read(row.data["end_time"], "s"),
        input_tokens=row.tokens(
            "input",
            "info.response_metrics.server_usage.prompt_tokens",
            "info.request_metrics.text.input_tokens",
            "info.input_tokens",
        ),
        output_tokens=row.tokens(
            "output",
            "info.response_metrics.server_usage.completion_tokens",
            "info.response_metrics.output_tokens",
            "info.output_tokens",
        ),
        prompt=prompt_of(request),
        output=answer_of(response) if isinstance(response, Mapping) else None,
        cap_tokens=cap_of(Row({"request": request}, {}), "request"),
        session=row.session("session_id"),
    )


FORMAT = Format(
    "inference-perf",
    "inference-perf's `per_request_lifecycle_metrics.json`",
    '[{"start_time": 12.5, "end_time": 14.1, "request": "{\\"prompt\\": \\"Why?\\"}", "response": '
    '"", "info": {"input_tokens": 305, "output_tokens": 157}, "error": null}]',
    "arrivals, lengths, caps, prompts",
    _is_record,
    _read,
)
