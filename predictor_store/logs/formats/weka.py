"""Reads sessions of coding agents in the format of Weka's cc-traces, one per row or file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import was_cut
from predictor_store.logs.request import LoggedRequest

_BLOCK_TOKENS = 64
# The added fields of a record: the whole session, the agent in it, the step and the one before it.
_SESSION, _AGENT, _ID, _PARENT = "sage_session", "sage_agent", "sage_id", "sage_parent"
_NOTE = (
    "a session has times of its own, from 0 on, so that all sessions begin together; a step comes "
    "after the answer to the one before"
)


def _is_session(row: Mapping[str, Any]) -> bool:
    requests = row.get("requests")
    first = requests[0] if isinstance(requests, list) and requests else None
    return isinstance(first, Mapping) and "t" in first and ("in" in first or "requests" in first)


def _records(row: Mapping[str, Any]) -> Iterator[Any]:
    id_ = str(row.get("id") or zlib.crc32(repr(row["requests"][0]).encode()))
    of_session = {"hash_id_scope": row.get("hash_id_scope"), "block_size": row.get("block_size")}
    yield from _steps(row["requests"], 0.0, of_session | {_SESSION: id_}, id_, "")


def _steps(
    steps: list[Any], begin_s: float, about: Mapping[str, Any], agent: str, before: str
) -> Iterator[Any]:
    """Yield the steps of an agent and, in their places, of its subagents.

    begin_s: when the agent begins. about: fields for all steps. agent: its name. before: the id of
        the step before its first; "" for none.
    """
    for number, step in enumerate(steps):
        t = step.get("t") if isinstance(step, Mapping) else None
        if isinstance(t, int | float) and not isinstance(t, bool):
            t = t if t >= begin_s else begin_s + t
            if isinstance(step.get("requests"), list):
                yield from _steps(step["requests"], t, about, f"{agent}/{number}", before)
                continue
            before, parent = f"{agent} step {number}", before
            yield {**step, **about, "t": t, _AGENT: agent, _ID: before, _PARENT: parent}
        else:
            yield RowError(
                "with a time that cannot be read", f"t of {agent} step {number} is {t!r:.40}"
            )


def _read(row: Row, context: Context) -> LoggedRequest:
    context.notes.add(_NOTE)
    input_tokens, output_tokens = row.tokens("input", "in"), row.tokens("output", "out")
    if input_tokens is None or output_tokens is None:
        raise RowError("without lengths", row.text(_ID))
    # A block's number identifies it within its session only, unless the scope is global.
    is_global = row.data.get("hash_id_scope") == "global"
    salt = 0 if is_global else zlib.crc32(row.data[_SESSION].encode()) << 40
    return LoggedRequest(
        arrival=context.clock.read(row.find("arrival", "t"), "s"),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        is_cut=was_cut(row.data.get("stop")),
        blocks=tuple(salt + int(block) for block in row.data.get("hash_ids") or ()),
        block_tokens=row.tokens("block size", "block_size") or _BLOCK_TOKENS,
        ttlt_s=row.seconds("time to last token", "api_time", "duration"),
        session=row.data[_AGENT],
        id=row.data[_ID],
        parent=row.data[_PARENT],
    )


READER = Reader(_read, recognizes=_is_session, records=_records)
