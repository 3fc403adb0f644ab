"""Reads WildChat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.conversations import read
from predictor_store.logs.format import Format


def _is_wildchat(row: Mapping[str, Any]) -> bool:
    marks = ("conversation_hash", "hashed_ip", "toxic")
    return "conversation" in row and any(mark in row for mark in marks)


FORMAT = Format(
    "wildchat",
    "WildChat; answers are counted with `--tokenizer`",
    '{"conversation_hash": "x", "timestamp": "2023-04-09 00:02:53+00:00", "conversation": [{"role":'
    ' "user", "content": "Why?"}, {"role": "assistant", "content": "So."}], "turn": 1}',
    "prompts, answers, times",
    _is_wildchat,
    read,
)
