"""Reads Azure's LLM inference traces of 2023 and 2024 (Patel et al., ISCA 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Format
from predictor_store.logs.request import LoggedRequest


def _is_row(row: Mapping[str, Any]) -> bool:
    return "ContextTokens" in row and "GeneratedTokens" in row


def _read(row: Row, context: Context) -> LoggedRequest:
    return LoggedRequest(
        arrival=context.clock.read(row.find("arrival", "TIMESTAMP", "Timestamp", "timestamp")),
        input_tokens=row.tokens("input", "ContextTokens"),
        output_tokens=row.tokens("output", "GeneratedTokens"),
    )


FORMAT = Format(
    "azure",
    "Azure's LLM traces of 2023 and 2024; times without a zone are UTC",
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "arrivals, lengths",
    _is_row,
    _read,
)
