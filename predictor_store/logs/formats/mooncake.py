"""Mooncake's traces (Qin et al., FAST 2025) as aiperf and Dynamo read and write them too, and
Qwen-Bailian's (Wang et al., ATC 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from predictor_store.logs.fields import Row, duration_s, parsed, value_at
from predictor_store.logs.format import Context, Format
from predictor_store.logs.messages import prompt_of
from predictor_store.logs.request import LoggedRequest

_BLOCK_TOKENS, _BAILIAN_BLOCK_TOKENS = 512, 16
# A prompt of fewer blocks does not show how long one is.
_LEAST_BLOCKS = 4


def _is_mooncake(row: Mapping[str, Any]) -> bool:
    has_time = not row.keys().isdisjoint(("timestamp", "delay", "session_id"))
    return "input_length" in row and "output_length" in row and has_time


def _is_bailian(row: Mapping[str, Any]) -> bool:
    return _is_mooncake(row) and "chat_id" in row and "parent_chat_id" in row


def _read(row: Row, context: Context) -> Iterator[LoggedRequest]:
    request = _lengths_of(row, _BLOCK_TOKENS)
    request.session = row.text("session_id")
    request.prompt = prompt_of(value_at(row.data, "text_input") or value_at(row.data, "messages"))
    if (timestamp := row.find("arrival", "timestamp")) is not None:
        request.arrival = context.clock.read(timestamp, usual="ms")
    if (delay := row.find("pause", "delay")) is not None:
        request.pause_s = duration_s(delay, "delay", "ms")
    yield request


def _read_bailian(row: Row, context: Context) -> Iterator[LoggedRequest]:
    request = _lengths_of(row, _BAILIAN_BLOCK_TOKENS)
    request.arrival = context.clock.read(row.find("arrival", "timestamp"), "s")
    request.id, parent = row.text("chat_id"), row.text("parent_chat_id")
    request.parent = "" if parent == "-1" else parent
    yield request


def _lengths_of(row: Row, block_tokens: int) -> LoggedRequest:
    blocks = tuple(map(int, parsed(row.find("blocks", "hash_ids")) or ()))
    input_tokens = row.tokens("input", "input_length")
    if input_tokens is not None and len(blocks) >= _LEAST_BLOCKS:
        least = -(-input_tokens // len(blocks))
        if not block_tokens < 2 * least < 3 * block_tokens:
            block_tokens = 1 << (least - 1).bit_length()  # of another trace in this format
    return LoggedRequest(
        input_tokens=input_tokens,
        output_tokens=row.tokens("output", "output_length"),
        blocks=blocks,
        block_tokens=block_tokens if blocks else 0,
    )


BAILIAN = Format(
    "bailian",
    "Qwen-Bailian's traces; times in seconds, blocks of 16 tokens",
    '{"chat_id": 1, "parent_chat_id": 0, "timestamp": 0.139, "input_length": 40, "output_length": '
    '29, "type": "text", "turn": 2, "hash_ids": [0, 1, 2]}',
    "arrivals, lengths, shared prefixes, parents",
    _is_bailian,
    _read_bailian,
)
MOONCAKE = Format(
    "mooncake",
    "Mooncake's traces, and aiperf's and Dynamo's of that form; times in milliseconds",
    '{"timestamp": 27482, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}',
    "arrivals, lengths, shared prefixes, sessions",
    _is_mooncake,
    _read,
)
