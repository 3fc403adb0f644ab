"""Mooncake's traces (Qin et al., FAST 2025), which aiperf and Dynamo read and write too."""

from __future__ import annotations

from predictor_store.logs.fields import Row, duration_s, parsed, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import prompt_of
from predictor_store.logs.request import LoggedRequest

_BLOCK_TOKENS = 512
# A prompt of fewer blocks does not show the size of a block.
_LEAST_BLOCKS = 4


def _read(row: Row, context: Context) -> LoggedRequest:
    request = lengths_of(row, _BLOCK_TOKENS)
    request.session = row.session("session_id")
    request.prompt = prompt_of(value_at(row.data, "text_input") or value_at(row.data, "messages"))
    if (timestamp := row.find("arrival", "timestamp")) is not None:
        request.arrival = context.clock.read(timestamp, usual="ms")
    if (delay := row.find("pause", "delay")) is not None:
        request.pause_s = duration_s(delay, "delay", "ms")
    return request


def lengths_of(row: Row, block_tokens: int) -> LoggedRequest:
    blocks = tuple(map(int, parsed(row.find("blocks", "hash_ids")) or ()))
    input_tokens = row.tokens("input", "input_length")
    if input_tokens is not None and len(blocks) >= _LEAST_BLOCKS:
        least = -(-input_tokens // len(blocks))
        if not block_tokens < 2 * least < 3 * block_tokens:
            block_tokens = 1 << (least - 1).bit_length()  # another trace of this format
    return LoggedRequest(
        input_tokens=input_tokens,
        output_tokens=row.tokens("output", "output_length"),
        blocks=blocks,
        block_tokens=block_tokens if blocks else 0,
    )


READER = Reader(_read)
