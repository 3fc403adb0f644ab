"""Reads Qwen-Bailian's traces (Wang et al., ATC 2025)."""

from __future__ import annotations

from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.formats.mooncake import lengths_of
from predictor_store.logs.request import LoggedRequest

_BLOCK_TOKENS = 16


def _read(row: Row, context: Context) -> LoggedRequest:
    request = lengths_of(row, _BLOCK_TOKENS)
    request.arrival = context.clock.read(row.find("arrival", "timestamp"), "s")
    request.id, parent = row.text("chat_id"), row.text("parent_chat_id")
    request.parent = "" if parent == "-1" else parent
    return request


READER = Reader(_read)
