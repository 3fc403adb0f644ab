"""Reads BurstGPT (Wang et al., KDD 2025), v1 and v2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Format
from predictor_store.logs.request import LoggedRequest

_IN, _OUT = "Request tokens", "Response tokens"


def _is_row(row: Mapping[str, Any]) -> bool:
    return _IN in row and _OUT in row


def _read(row: Row, context: Context) -> LoggedRequest:
    output_tokens = row.tokens("output", _OUT)
    if output_tokens == 0:
        raise RowError("that failed", "it has no response tokens")
    return LoggedRequest(
        arrival=context.clock.read(row.find("arrival", "Timestamp"), "s"),
        input_tokens=row.tokens("input", _IN),
        output_tokens=output_tokens,
        ttlt_s=row.seconds("time to last token", "Elapsed time"),
        session=row.session("Session ID"),
    )


FORMAT = Format(
    "burstgpt",
    "BurstGPT's CSV files, v1 and v2; times in seconds",
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "arrivals, lengths, in v2 sessions",
    _is_row,
    _read,
)
