"""Reads ShareGPT's conversations, in all spellings of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.conversations import chat_of, read
from predictor_store.logs.format import Format


def _is_sharegpt(row: Mapping[str, Any]) -> bool:
    return bool(chat_of(row))


FORMAT = Format(
    "sharegpt",
    "ShareGPT's conversations, in all spellings; answers are counted with `--tokenizer`",
    '{"id": "x", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": '
    '"So."}]}',
    "prompts, answers, times if the rows have them",
    _is_sharegpt,
    read,
)
