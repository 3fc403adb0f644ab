"""Data sets of conversations: ShareGPT in all spellings, lmsys-chat, WildChat and UltraChat. The
first question and its answer count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row, parsed, plain_name
from predictor_store.logs.format import Context, Format
from predictor_store.logs.formats import table
from predictor_store.logs.messages import CHATS, first_exchange, is_turn
from predictor_store.logs.request import LoggedRequest


def _chat_of(row: Mapping[str, Any]) -> list[Any]:
    for name in (*CHATS, "data", "conversation_a"):
        chat = parsed(row.get(name))
        if isinstance(chat, list) and chat and is_turn(chat[0]):
            return chat
    return []


def _reader(lengths: Callable[[Row], int | None], times: tuple[str, ...] = ()) -> Any:
    def read(row: Row, context: Context) -> Iterator[LoggedRequest]:
        chat = _chat_of(row.data)
        prompt, output = first_exchange(chat)
        if not prompt:
            raise RowError("without a question of a human", f"{chat!r:.60}")
        when = row.find("arrival", *times) if times else None
        yield LoggedRequest(
            arrival=None if when is None else context.clock.read(when),
            output_tokens=lengths(row),
            prompt=prompt,
            output=output,
        )

    return read


def _recorded(row: Row) -> int | None:
    names = [name for name in row.data if plain_name(name)[0] in table.OUTPUT]
    return row.tokens("output", *(name for name in names if name not in ("output", "response")))


def _is_sharegpt(row: Mapping[str, Any]) -> bool:
    return bool(_chat_of(row))


def _is_lmsys(row: Mapping[str, Any]) -> bool:
    return "conversation_id" in row and "conversation" in row and "turn" in row


def _is_wildchat(row: Mapping[str, Any]) -> bool:
    marks = ("conversation_hash", "hashed_ip", "toxic")
    return "conversation" in row and any(mark in row for mark in marks)


def _is_ultrachat(row: Mapping[str, Any]) -> bool:
    data = row.get("data")
    return isinstance(data, list) and bool(data) and isinstance(data[0], str)


SHAREGPT = Format(
    "sharegpt",
    "ShareGPT's conversations, in all spellings; answers are counted with `--tokenizer`",
    '{"id": "x", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": '
    '"So."}]}',
    "prompts, answers",
    _is_sharegpt,
    _reader(_recorded),
)
LMSYS = Format(
    "lmsys",
    "lmsys-chat-1m; answers are counted with `--tokenizer`",
    '{"conversation_id": "x", "model": "m", "conversation": [{"role": "user", "content": "Why?"}, '
    '{"role": "assistant", "content": "So."}], "turn": 1}',
    "prompts, answers",
    _is_lmsys,
    _reader(_recorded),
)
WILDCHAT = Format(
    "wildchat",
    "WildChat; answers are counted with `--tokenizer`",
    '{"conversation_hash": "x", "timestamp": "2023-04-09 00:02:53+00:00", "conversation": [{"role":'
    ' "user", "content": "Why?"}, {"role": "assistant", "content": "So."}], "turn": 1}',
    "prompts, answers, times",
    _is_wildchat,
    _reader(_recorded, ("timestamp", "conversation.0.timestamp")),
)
ULTRACHAT = Format(
    "ultrachat",
    "UltraChat; answers are counted with `--tokenizer`",
    '{"id": "0", "data": ["Why?", "So.", "And?", "Thus."]}',
    "prompts, answers",
    _is_ultrachat,
    _reader(_recorded),
)
