"""Answers refused requests with status 429, and requests that end in SGLang's queue with 503, a
Retry-After header and the reason, in the form of errors that the route's clients know. It also
answers dry runs, and requests of batches that cannot be done in time (400).

SGLang's own answer to an aborted request has no such header. For a stream it comes too late,
because the stream has begun by then, with status 200. While requests may be refused, the head of an
answer therefore waits for the first token. Otherwise it goes at once, as without us.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from patches.http.incoming import incoming, route_of
from patches.messages import REFUSED, TOO_LATE, refusal_in

DRY_RUN_HEADER = "x-sage-dry-run"
_TOLD = "sage.told"
_REFUSAL, _ROUTE = "refusal", "route"
# A stream of /v1/responses has these events before SGLang begins with the request.
_EARLY_EVENTS = (b"event: response.created\n", b"event: response.in_progress\n")
# The functions of entrypoints/http_server.py whose clients expect other errors than OpenAI's.
_ANTHROPIC = "anthropic_v1_messages"
_OLLAMA = ("ollama_chat", "ollama_generate")
# What errors of these statuses are called, by OpenAI's form and by Anthropic's.
_KINDS = {
    REFUSED: ("overloaded", "rate_limit_error"),
    TOO_LATE: ("BadRequestError", "invalid_request_error"),
}
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class RefusedResponses:
    """Middleware that replaces SGLang's answer to a refused request or a dry run.

    may_refuse: whether requests may be refused at present.
    may_end: the headers that may end a request, except that of dry runs.
    """

    def __init__(
        self, app: Any, may_refuse: Callable[[], bool], may_end: Collection[str] = ()
    ) -> None:
        self._app, self._may_refuse = app, may_refuse
        self._may_end = {name.encode() for name in (DRY_RUN_HEADER, *may_end)}

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told: dict[str, Any] = {}
        scope[_TOLD] = told
        may_end = any(name in self._may_end for name, _ in scope.get("headers", ()))
        answer = _Answer(send, told, waits=may_end or self._may_refuse())
        try:
            await self._app(scope, receive, answer.send)
        except ValueError as error:
            # A malformed request. On these routes SGLang would answer with status 500.
            if told.get(_ROUTE) not in _OLLAMA:
                raise
            await answer.fail(str(error))


class _Answer:
    """Passes SGLang's answer to one request on, or replaces it.

    waits: whether the head waits for the first part that shows that the request was admitted.
    """

    def __init__(self, send: Send, told: Mapping[str, Any], *, waits: bool) -> None:
        self._send, self._told, self._waits = send, told, waits
        self._held: list[Message] = []
        self._has_begun = self._is_replaced = False

    async def send(self, message: Message) -> None:
        if self._is_replaced:
            return
        if self._has_begun:
            await self._send(message)
        elif _REFUSAL in self._told:
            await self._replace(_response(self._told[_REFUSAL], self._told.get(_ROUTE)))
        else:
            self._held.append(message)
            is_early = message.get("body", b"").startswith(_EARLY_EVENTS)
            if not (self._waits and (len(self._held) == 1 or is_early)):
                await self._begin()

    async def _begin(self) -> None:
        self._has_begun = True
        for message in self._held:
            await self._send(message)
        self._held.clear()

    async def _replace(self, parts: tuple[Message, Message]) -> None:
        self._is_replaced = True
        for part in parts:
            await self._send(part)

    async def fail(self, error: str) -> None:
        """Answer a malformed request of an Ollama client, whose stream may have begun."""
        if not self._has_begun:
            await self._replace(_json_response(400, {"error": error}))
            return
        line = json.dumps({"error": error}).encode() + b"\n"
        await self._send({"type": "http.response.body", "body": line})


def _response(refusal: Mapping[str, Any], route: str | None) -> tuple[Message, Message]:
    about = {name: value for name, value in refusal.items() if name != "code"}
    if "late" in refusal:  # a dry run
        return _json_response(200, about)
    code: int = refusal["code"]
    kind, of_anthropic = _KINDS.get(code, ("overloaded", "overloaded_error"))
    body: dict[str, Any] = {"error": {"object": "error", "type": kind, **refusal}}
    if route == _ANTHROPIC:
        body = {"type": "error", "error": {**about, "type": of_anthropic}}
    elif route in _OLLAMA:
        body = {"error": about.pop("message"), **about}
    return _json_response(code, body, refusal.get("retry_after_s"))


def _json_response(
    status: int, content: Mapping[str, Any], retry_after_s: int | None = None
) -> tuple[Message, Message]:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}


def note_request(obj: Any, request: Any) -> None:
    """Record, before a request is processed, its route, and where its refusal has to go. request:
    FastAPI's, or None."""
    told = incoming(obj).told = getattr(request, "scope", {}).get(_TOLD)
    if told is not None:
        told[_ROUTE] = route_of(request)


def note_refusal(manager: TokenizerManager, abort: AbortReq) -> bool:
    """Record a refusal before SGLang processes its abort. Return whether any other request may be
    refused too."""
    refusal, state = refusal_in(abort), manager.rid_to_state.get(abort.rid)
    if refusal is None:
        return False
    if state is not None and (told := incoming(state.obj).told) is not None:
        told.setdefault(_REFUSAL, refusal)
    return "late" not in refusal and refusal["code"] != TOO_LATE
