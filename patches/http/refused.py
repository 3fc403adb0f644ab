"""Answers refused requests with status 429, a Retry-After header and the reason. It also answers
dry runs, and adds a header to the answers of degraded requests.

SGLang's own answer to an aborted request has no such header. For a stream it comes too late,
because the stream has begun by then, with status 200.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from starlette.middleware import Middleware

from patches.http.incoming import incoming
from patches.loads import DEGRADED
from patches.messages import REFUSED, refusal_in

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_TOLD = "sage.told"
_REFUSAL = "refusal"
_DEGRADED_HEADER = b"x-sage-overload"
Message = MutableMapping[str, Any]


class RefusedResponses:
    """Middleware that replaces SGLang's answer to a refused request or a dry run, and adds a header
    to that of a degraded one."""

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
        told: dict[str, Any] = {}
        scope[_TOLD] = told
        start: Message | None = None
        was_answered = False

        async def answer(message: Message) -> None:
            nonlocal start, was_answered
            if message["type"] == "http.response.start":
                start = message
            elif _REFUSAL in told and (start is not None or was_answered):
                if not was_answered:
                    for part in _response(told[_REFUSAL]):
                        await send(part)
                start, was_answered = None, True
            else:
                if start is not None:
                    if DEGRADED in told:
                        degraded = (_DEGRADED_HEADER, str(told[DEGRADED]).encode())
                        start["headers"] = [*start["headers"], degraded]
                    await send(start)
                    start = None
                await send(message)

        await self._app(scope, receive, answer)


def _response(refusal: dict[str, Any]) -> tuple[Message, Message]:
    is_dry_run = "late" in refusal
    error = {"object": "error", "type": "overloaded", "code": REFUSED, **refusal}
    body = json.dumps(refusal if is_dry_run else {"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if not is_dry_run:
        headers.append((b"retry-after", str(refusal["retry_after_s"]).encode()))
    status = 200 if is_dry_run else REFUSED
    start = {"type": "http.response.start", "status": status, "headers": headers}
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
    incoming(obj).told = getattr(request, "scope", {}).get(_TOLD)


def note_refusal(manager: TokenizerManager, abort: AbortReq) -> None:
    """Record a refusal before SGLang processes its abort."""
    refusal, state = refusal_in(abort), manager.rid_to_state.get(abort.rid)
    if refusal is None or state is None:
        return
    told = incoming(state.obj).told
    if told is not None:
        told.setdefault(_REFUSAL, refusal)


def note_degraded(state: Any, info: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Record whether a request was degraded. Return the scheduler's additions that SGLang is to put
    into its meta_info.

    state: the request's ReqState. info: the additions for a batch, as lists by name. index: the
        place of the request in these lists.
    """
    how = info[DEGRADED][index] if DEGRADED in info else []
    told = incoming(state.obj).told
    if how and told is not None:
        told[DEGRADED] = how[0]
    # Otherwise all requests of the batch would have the field.
    return {name: values for name, values in info.items() if how or name != DEGRADED}
