"""Reads UltraChat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.conversations import read
from predictor_store.logs.format import Format


def _is_ultrachat(row: Mapping[str, Any]) -> bool:
    data = row.get("data")
    return isinstance(data, list) and bool(data) and isinstance(data[0], str)


FORMAT = Format(
    "ultrachat",
    "UltraChat; answers are counted with `--tokenizer`",
    '{"id": "0", "data": ["Why?", "So.", "And?", "Thus."]}',
    "prompts, answers",
    _is_ultrachat,
    read,
)
