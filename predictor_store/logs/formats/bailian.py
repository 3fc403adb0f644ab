"""Reads Qwen-Bailian's traces (Wang et al., ATC 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Format
from predictor_store.logs.formats.mooncake import is_trace, lengths_of
from predictor_store.logs.request import LoggedRequest

_BLOCK_TOKENS = 16


def _is_row(row: Mapping[str, Any]) -> bool:
    return is_trace(row) and "chat_id" in row and "parent_chat_id" in row


def _read(row: Row, context: Context) -> LoggedRequest:
    request = lengths_of(row, _BLOCK_TOKENS)
    request.arrival = context.clock.read(row.find("arrival", "timestamp"), "s")
    request.id, parent = row.text("chat_id"), row.text("parent_chat_id")
    request.parent = "" if parent == "-1" else parent
    return request


FORMAT = Format(
    "bailian",
    "Qwen-Bailian's traces; times in seconds, blocks of 16 tokens",
    '{"chat_id": 1, "parent_chat_id": 0, "timestamp": 0.139, "input_length": 40, "output_length": '
    '29, "type": "text", "turn": 2, "hash_ids": [0, 1, 2]}',
    "arrivals, lengths, shared prefixes, parents",
    _is_row,
    _read,
)
