"""Keeps streams open while no token comes: an SSE comment goes out at intervals.

Proxies and load balancers close a connection after 50 to 60 s without a byte, and a request may
wait longer than that for its first token, or swapped out. Clients ignore comments, by the standard
(https://html.spec.whatwg.org/multipage/server-sent-events.html). Ollama's streams of JSON lines
have no comments, and its clients fail at an empty line: they stay as they are.

Under /v1/chat/completions and /v1/completions SGLang sends the head with the first token. A comment
that comes before has a head of ours with status 200, and a later error becomes an event of the
stream. All other routes send their head at once and errors as events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_STREAM = "sage.stream"
_COMMENT = b": waiting\n\n"
_EVENT_STREAM = b"text/event-stream"
_EVENT_END = b"\n\n"
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class KeepsOpen:
    """Middleware that sends comments in streams that have been silent for interval_s."""

    def __init__(self, app: Any, interval_s: float) -> None:
        self._app, self._interval_s = app, interval_s

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stream = scope[_STREAM] = _Stream(send, self._interval_s)
        try:
            await self._app(scope, receive, stream.send)
        except Exception:
            await stream.fail()
            raise
        finally:
            stream.end()


class _Stream:
    """One answer on its way to the client. It may be a stream.

    has_head: whether the client has a head, SGLang's or ours.
    is_ours: whether the head is ours.
    error: the body of SGLang's error that can no longer have its own head; None if there is none.
    """

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send, self._interval_s = send, interval_s
        self._in_turn = asyncio.Lock()
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None
        self._sent_s = 0.0
        self._has_head = self._is_ours = False
        self._is_between_events = True
        self._error: bytes | None = None

    def begin(self) -> None:
        """Send comments from now on, because the request asks for a stream."""
        if self._task is None and not self._has_ended:
            self._sent_s = asyncio.get_running_loop().time()
            self._task = asyncio.create_task(self._comment())

    def end(self) -> None:
        """Send no further comment."""
        self._has_ended = True
        if self._task is not None:
            self._task.cancel()

    async def send(self, message: Message) -> None:
        """Pass a message of SGLang's answer on."""
        async with self._in_turn:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(_EVENT_STREAM)
            if not is_stream:
                self.end()
            if self._is_ours:
                self._error = None if is_stream else b""
                return
            self._has_head = True
        elif message["type"] == "http.response.body":
            body, is_last = message.get("body", b""), not message.get("more_body")
            if self._error is not None:
                self._error += body
                if is_last:
                    await self._fail_with(self._error)
                return
            if is_last:
                self.end()
            if body:
                self._sent_s = asyncio.get_running_loop().time()
                self._is_between_events = body.endswith(_EVENT_END)
        await self._send(message)

    async def fail(self) -> None:
        """End a stream with our head after SGLang has failed without an answer. Without our head,
        SGLang's app answers with status 500."""
        async with self._in_turn:
            if self._is_ours and not self._has_ended:
                await self._fail_with(b'{"message": "Internal Server Error", "code": 500}')

    async def _fail_with(self, body: bytes) -> None:
        """Send an error as events that OpenAI's clients know, and end the stream."""
        try:
            found = json.loads(body)
        except ValueError:
            found = {"message": body.decode(errors="replace")}
        error = found if isinstance(found, dict) and "error" in found else {"error": found}
        events = b"data: " + json.dumps(error).encode() + _EVENT_END + b"data: [DONE]" + _EVENT_END
        await self._send({"type": "http.response.body", "body": events})

    async def _comment(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._sent_s + self._interval_s - loop.time())
            async with self._in_turn:
                if loop.time() < self._sent_s + self._interval_s:
                    continue  # something was sent meanwhile
                self._sent_s = loop.time()
                if self._is_between_events:
                    await self._send_comment()

    async def _send_comment(self) -> None:
        if not self._has_head:
            self._has_head = self._is_ours = True
            head = (b"content-type", _EVENT_STREAM + b"; charset=utf-8")
            await self._send({"type": "http.response.start", "status": 200, "headers": [head]})
        await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


def note_stream(obj: Any, request: Any) -> None:
    """Begin with comments if a request asks for a stream. request: FastAPI's, or None."""
    stream = getattr(request, "scope", {}).get(_STREAM)
    if stream is not None and obj.stream:
        stream.begin()
