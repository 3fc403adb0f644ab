"""Reads Claude Code's transcripts of sessions: one row per message, or per part of an answer."""

from __future__ import annotations

from collections.abc import Mapping

from predictor_store.logs.errors import NoRequestError, RowError
from predictor_store.logs.fields import Row, value_at
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import prompt_of, usage_tokens, was_cut
from predictor_store.logs.request import LoggedRequest


def _read(row: Row, context: Context) -> LoggedRequest | None:
    """Hold the request until the file ends: the last row of an answer has its whole length. It came
    when the message before the answer did."""
    uuid, before = row.text("uuid"), context.asked.get(row.text("parentUuid")) or LoggedRequest()
    said, id_ = row.data.get("message"), row.text("requestId", "message.id")
    if row.data.get("type") != "assistant" or not isinstance(said, Mapping):
        at_s = context.clock.read(row.find("arrival", "timestamp")) if uuid else None
        asked = prompt_of(said) or before.prompt
        context.asked[uuid] = LoggedRequest(at_s, prompt=asked, parent=before.id or before.parent)
        raise NoRequestError
    context.asked[uuid] = before
    num_in, num_out = usage_tokens(row.find("output", "message.usage"))
    if row.data.get("isApiErrorMessage") or said.get("model") == "<synthetic>" or num_out is None:
        raise RowError("that failed", f"its usage is {said.get('usage')!r:.60}")
    began = before.end if before.id else before.arrival
    request = context.held.setdefault(id_, LoggedRequest(began, prompt=before.prompt, id=id_))
    request.parent = request.parent or (before.id if before.id != id_ else "") or before.parent
    request.end = context.clock.read(row.data.get("timestamp"))
    request.input_tokens = num_in
    request.output_tokens = max(num_out, request.output_tokens or 0)
    request.is_cut = was_cut(value_at(said, "stop_reason"))
    request.session = f"{row.session('sessionId')} {row.text('agentId')}".rstrip()
    context.asked[uuid] = request
    return None


READER = Reader(_read)
