"""Reads the first question and its answer from data sets of conversations."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
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


def read(row: Row, context: Context) -> LoggedRequest:
    """Return the first question and its answer, with the time of the conversation if it can be
    read. Raises RowError."""
    chat = chat_of(row.data)
    prompt, output = first_exchange(chat)
    if not prompt:
        raise RowError("without a question from a human", f"{chat!r:.60}")
    input_tokens, output_tokens = table.recorded_lengths(row)
    return LoggedRequest(
        arrival=_begin_of(row, chat[0], context),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prompt=prompt,
        output=output,
    )


def _begin_of(row: Row, turn: Any, context: Context) -> float | None:
    """Return the time in a row or in its first turn; None if it is missing or malformed, because
    prompt and answer are of use without it."""
    for data in (row.data, turn):
        if isinstance(data, Mapping):
            with contextlib.suppress(RowError):
                if (arrival := table.time_of(Row(data, row.usage), "arrival", context)) is not None:
                    return arrival
    return None
