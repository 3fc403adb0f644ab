"""Reads sessions of coding agents in the format of Weka's cc-traces, one per row or file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Format
from predictor_store.logs.messages import was_cut
from predictor_store.logs.request import LoggedRequest

_BLOCK_TOKENS = 64
_NOTE = (
    "a session has times of its own, from 0 on, so that all sessions begin together; a step comes "
    "after the answer to the one before"
)


def _is_session(row: Mapping[str, Any]) -> bool:
    requests = row.get("requests")
    first = requests[0] if isinstance(requests, list) and requests else None
    return isinstance(first, Mapping) and "t" in first and ("in" in first or "requests" in first)


def _read(row: Row, context: Context) -> Iterator[LoggedRequest]:
    session = row.text("id") or f"session {len(context.asked)}"
    context.notes.add(_NOTE)
    block_tokens = row.tokens("block size", "block_size") or _BLOCK_TOKENS
    # A block's number identifies it within its session only, unless the scope is global.
    is_global = row.data.get("hash_id_scope") == "global"
    salt = 0 if is_global else zlib.crc32(session.encode()) << 40
    for number, (step, t) in enumerate(_steps(row.data["requests"], 0.0)):
        inner = Row(step, {})
        row.used("arrival", "requests.t")
        row.used("input", "requests.in")
        row.used("output", "requests.out")
        input_tokens, output_tokens = inner.tokens("in", "in"), inner.tokens("out", "out")
        if input_tokens is None or output_tokens is None:
            raise RowError("without lengths", f"request {number} of {session}")
        yield LoggedRequest(
            arrival=context.clock.read(t, "s"),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            is_cut=was_cut(step.get("stop")),
            blocks=tuple(salt + int(block) for block in step.get("hash_ids") or ()),
            block_tokens=block_tokens,
            ttlt_s=inner.seconds("time to last token", "api_time", "duration"),
            session=session,
        )


def _steps(requests: list[Any], begin_s: float) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield requests, also of subagents, and their times within the session."""
    for step in requests:
        t = float(step["t"])
        t = t if t >= begin_s else begin_s + t
        if isinstance(step.get("requests"), list):
            yield from _steps(step["requests"], t)
        else:
            yield step, t


FORMAT = Format(
    "weka",
    "coding agents' sessions in the format of Weka's cc-traces, one session per row or file",
    '{"id": "trace_0", "block_size": 64, "requests": [{"t": 0.0, "in": 120, "out": 76, '
    '"hash_ids": [1, 2], "api_time": 1.5}]}',
    "steps, lengths, shared prefixes, pauses",
    _is_session,
    _read,
)
