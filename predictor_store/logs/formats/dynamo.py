"""Reads Dynamo's request traces, also from its agent traces, one event per row."""

from __future__ import annotations

from predictor_store.logs.errors import NoRequestError
from predictor_store.logs.fields import Row, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import answer_of, cap_of, prompt_of, usage_tokens, was_cut
from predictor_store.logs.request import LoggedRequest


def _read(row: Row, context: Context) -> LoggedRequest:
    if row.data["event_type"] == "request_payload":
        return _with_texts(row)
    if row.data["event_type"] != "request_end" or "request" not in row.data:
        raise NoRequestError
    ttlt_s = row.seconds("time to last token", "request.total_time_ms", unit="ms")
    start = row.find("arrival", "request.request_received_ms")
    if start is not None:
        arrival = context.clock.read(start, "ms")
    else:
        end = row.find("arrival", "event_time_unix_ms")
        arrival = context.clock.read(end, "ms") - (ttlt_s or 0.0)
    replay = value_at(row.data, "request.replay") or {}
    return LoggedRequest(
        arrival=arrival,
        input_tokens=row.tokens("input", "request.input_tokens", "request.replay.input_length"),
        output_tokens=row.tokens("output", "request.output_tokens"),
        is_cut=was_cut(value_at(row.data, "request.finish_reason_metadata.finish_reason")),
        ttlt_s=ttlt_s,
        blocks=tuple(map(int, replay.get("input_sequence_hashes") or ())),
        block_tokens=int(replay.get("trace_block_size") or 0),
        session=row.session(
            "agent_context.session_id", "agent_context.program_id", "agent_context.workflow_id"
        ),
    )


def _with_texts(row: Row) -> LoggedRequest:
    """Return the request of a payload, which has no times."""
    request, response = (value_at(row.data, f"payload.{of}") for of in ("request", "response"))
    num_in, num_out = usage_tokens(value_at(response, "usage"))
    return LoggedRequest(
        input_tokens=num_in,
        output_tokens=num_out,
        output=answer_of(response),
        prompt=prompt_of(request),
        cap_tokens=cap_of(row, "payload.request"),
        is_cut=was_cut(value_at(response, "choices.0.finish_reason")),
    )


READER = Reader(_read)
