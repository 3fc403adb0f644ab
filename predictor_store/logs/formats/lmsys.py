"""Reads lmsys-chat-1m."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.conversations import read
from predictor_store.logs.format import Format


def _is_lmsys(row: Mapping[str, Any]) -> bool:
    return "conversation_id" in row and "conversation" in row and "turn" in row


FORMAT = Format(
    "lmsys",
    "lmsys-chat-1m; answers are counted with `--tokenizer`",
    '{"conversation_id": "x", "model": "m", "conversation": [{"role": "user", "content": "Why?"}, '
    '{"role": "assistant", "content": "So."}], "turn": 1}',
    "prompts, answers, times if the rows have them",
    _is_lmsys,
    read,
)
