"""Answers refused requests with status 429, the time to come back, and the reason.

SGLang's own answer to an aborted request has no such header. For a stream it comes too late,
because a stream has begun by then, with status 200.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from starlette.middleware import Middleware

from patches.http.incoming import incoming
from patches.messages import REFUSED, refusal_in

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_REFUSAL = "sage.refusal"
Message = MutableMapping[str, Any]


class RefusedResponses:
    """Middleware that replaces SGLang's answer to a refused request."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusals: list[dict[str, Any]] = []
        scope[_REFUSAL] = refusals
        start: Message | None = None
        was_answered = False

        async def answer(message: Message) -> None:
            nonlocal start, was_answered
            if message["type"] == "http.response.start":
                start = message
            elif refusals and (start is not None or was_answered):
                if not was_answered:
                    for part in _response(refusals[0]):
                        await send(part)
                start, was_answered = None, True
            else:
                if start is not None:
                    await send(start)
                    start = None
                await send(message)

        await self._app(scope, receive, answer)


def _response(refusal: dict[str, Any]) -> tuple[Message, Message]:
    error = {"object": "error", "type": "overloaded", "code": REFUSED, **refusal}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(refusal["retry_after_s"]).encode()),
    ]
    start = {"type": "http.response.start", "status": REFUSED, "headers": headers}
    return start, {"type": "http.response.body", "body": body}


def add_refused_responses() -> None:
    """Add the middleware to the HTTP server, if this program has one. It may be serving its warm-up
    already."""
    if (server := sys.modules.get(_HTTP_SERVER)) is None:
        return
    app = server.app
    app.user_middleware.insert(0, Middleware(RefusedResponses))
    if app.middleware_stack is not None:
        app.middleware_stack = app.build_middleware_stack()


def note_request(obj: Any, request: Any) -> None:
    """Record, before a request is processed, where its refusal has to go. request: FastAPI's, or
    None."""
    incoming(obj).refusals = getattr(request, "scope", {}).get(_REFUSAL)


def note_refusal(manager: TokenizerManager, abort: AbortReq) -> None:
    """Record a refusal before SGLang processes its abort."""
    refusal, state = refusal_in(abort), manager.rid_to_state.get(abort.rid)
    if refusal is None or state is None:
        return
    refusals = incoming(state.obj).refusals
    if refusals is not None:
        refusals.append(refusal)
