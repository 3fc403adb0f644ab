"""Reads aiperf's records, profile_export.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import NoRequestError, RowError
from predictor_store.logs.fields import Row, value_at
from predictor_store.logs.format import Context, Format
from predictor_store.logs.messages import answer_of, prompt_of
from predictor_store.logs.request import LoggedRequest


def _is_record(row: Mapping[str, Any]) -> bool:
    metadata = row.get("metadata")
    return isinstance(metadata, Mapping) and "request_start_ns" in metadata and "metrics" in row


def _read(row: Row, context: Context) -> LoggedRequest:
    if value_at(row.data, "metadata.benchmark_phase") == "warmup":
        raise NoRequestError
    if row.data.get("error") or value_at(row.data, "metadata.was_cancelled"):
        raise RowError("that failed", str(row.data.get("error"))[:80])
    start = row.find("arrival", "metadata.request_start_ns")
    end = row.find("end", "metadata.request_end_ns")
    turn = value_at(row.data, "metadata.turn_index")
    return LoggedRequest(
        arrival=context.clock.read(start, "ns"),
        end=None if end is None else context.clock.read(end, "ns"),
        input_tokens=row.tokens("input", *_metric("input_sequence_length", "isl")),
        output_tokens=_output_tokens(row),
        session=row.session("metadata.x_correlation_id") if turn is not None else "",
        prompt=prompt_of(row.data.get("payload")),
        output=answer_of(row.data.get("response")),
    )


def _output_tokens(row: Row) -> int | None:
    whole = row.tokens("output", *_metric("output_sequence_length", "osl"))
    if whole is not None:
        return whole
    said = row.tokens("output", *_metric("output_token_count"))
    thought = row.tokens("reasoning", *_metric("reasoning_token_count"))
    return None if said is None else said + (thought or 0)


def _metric(*names: str) -> list[str]:
    return [path for name in names for path in (f"metrics.{name}.value", f"metrics.{name}")]


FORMAT = Format(
    "aiperf",
    "aiperf's `profile_export.jsonl`",
    '{"metadata": {"request_start_ns": 1790000000097000000, "request_end_ns": '
    '1790000001297000000, "benchmark_phase": "profiling"}, "metrics": {"input_sequence_length": '
    '{"value": 305, "unit": "tokens"}, "output_sequence_length": {"value": 157, "unit": "tokens"'
    '}}, "error": null}',
    "arrivals, lengths, sessions",
    _is_record,
    _read,
)
