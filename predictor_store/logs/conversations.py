"""Reads the first question and its answer from data sets of conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row, parsed
from predictor_store.logs.format import Context
from predictor_store.logs.formats import table
from predictor_store.logs.messages import CHATS, first_exchange, is_turn
from predictor_store.logs.request import LoggedRequest


def chat_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the turns of a row's conversation; [] if it has none."""
    for name in (*CHATS, "data", "conversation_a"):
        chat = parsed(row.get(name))
        if isinstance(chat, list) and chat and is_turn(chat[0]):
            return chat
    return []


def reader_of(*times: str) -> Callable[[Row, Context], Iterator[LoggedRequest]]:
    """Return the reader of a format. times: fields that may have the
    conversation's time."""

    def read(row: Row, context: Context) -> Iterator[LoggedRequest]:
        chat = chat_of(row.data)
        prompt, output = first_exchange(chat)
        if not prompt:
            raise RowError("without a question from a human", f"{chat!r:.60}")
        when = row.find("arrival", *times) if times else None
        yield LoggedRequest(
            arrival=None if when is None else context.clock.read(when),
            output_tokens=table.recorded_lengths(row)[1],
            prompt=prompt,
            output=output,
        )

    return read
