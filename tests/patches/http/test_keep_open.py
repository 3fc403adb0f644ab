"""Bytes that clients of silent streams get, on an event loop with simulated time."""

from __future__ import annotations

import asyncio
import json
import math
import selectors
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from patches.http import state
from patches.http.keep_open import KeepsOpen, note_stream
from patches.http.refused import RefusedResponses
from tests.patches.http.conftest import HTTP_SERVER, Manager

SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"
COMMENT = ": waiting\n\n"


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next event."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self.now_s = 0.0
        poll = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            self.now_s += timeout or 0.0
            return poll(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


def client_gets(*steps: Any, asks: bool = True) -> list[tuple[float, Any]]:
    """Return a client's messages and their times, behind the middleware of refusals.

    steps: SGLang's app sleeps for numbers, begins an answer with (status, content type), sends
        bytes, and raises exceptions. The last bytes end the answer.
    """
    loop, got = Loop(), list[tuple[float, Any]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        note_stream(SimpleNamespace(stream=asks), SimpleNamespace(scope=scope))
        last = max((i for i, step in enumerate(steps) if isinstance(step, bytes)), default=0)
        for i, step in enumerate(steps):
            match step:
                case float():
                    await asyncio.sleep(step)
                case (status, kind):
                    headers = [(b"content-type", kind), (b"x-theirs", b"1")]
                    await send({"type": "http.response.start", "status": status,
                                "headers": headers})  # fmt: skip
                case bytes():
                    await send({"type": "http.response.body", "body": step, "more_body": i < last})
                case Exception():
                    raise step
                case dict():
                    scope["sage.told"]["refusal"] = step

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"])[b"content-type"].decode()
            got.append((loop.now_s, (message["status"], kind)))
        else:
            got.append((loop.now_s, message["body"].decode()))
            if not message.get("more_body"):
                got.append((loop.now_s, "end"))

    outer = RefusedResponses(KeepsOpen(app, 15.0), lambda: True)
    try:
        loop.run_until_complete(outer({"type": "http"}, None, send))  # type: ignore[arg-type]
        assert not asyncio.all_tasks(loop)
    except RuntimeError as error:
        got.append((loop.now_s, str(error)))
    finally:
        loop.close()
    return got


HEAD = (200, SSE.decode())
OPENS = (200, SSE)


@pytest.mark.parametrize(
    ("steps", "gets"),
    [
        # The head at once, and a pause of 40 s: any byte resets the clock.
        ((OPENS, b"data: 1\n\n", 10.0, b"data: 2\n\n", 40.0, b"data: 3\n\n"),
         [(0, HEAD), (0, "data: 1\n\n"), (10, "data: 2\n\n"), (25, COMMENT), (40, COMMENT),
          (50, "data: 3\n\n"), (50, "end")]),
        # The head with the first token: a comment comes before, with a head of ours.
        ((20.0, OPENS, b"data: 1\n\n", 14.0, b"data: 2\n\n"),
         [(15, HEAD), (15, COMMENT), (20, "data: 1\n\n"), (34, "data: 2\n\n"), (34, "end")]),
        # A head that waits until no refusal can come.
        ((OPENS, 16.0, b"data: 1\n\n"),
         [(15, HEAD), (15, COMMENT), (16, "data: 1\n\n"), (16, "end")]),
        # Within an event no comment may come.
        ((OPENS, b"data: ", 16.0, b"1\n\n", 16.0, b"data: 2\n\n"),
         [(0, HEAD), (0, "data: "), (16, "1\n\n"), (31, COMMENT), (32, "data: 2\n\n"),
          (32, "end")]),
        # Nothing comes after the end, or in an answer of another kind.
        ((OPENS, b"data: 1\n\n", 40.0), [(0, HEAD), (0, "data: 1\n\n"), (0, "end")]),
        (((200, b"application/x-ndjson"), b"{}\n", 40.0, b"{}\n"),
         [(0, (200, "application/x-ndjson")), (0, "{}\n"), (40, "{}\n"), (40, "end")]),
    ],
)  # fmt: skip
def test_a_silent_stream_gets_comments(
    steps: tuple[Any, ...], gets: list[tuple[float, Any]]
) -> None:
    assert client_gets(*steps) == gets


def test_an_answer_that_is_no_stream_gets_none() -> None:
    answer = (40.0, (200, JSON), b"{}")
    assert client_gets(*answer, asks=False) == [(40, (200, JSON.decode())), (40, "{}"), (40, "end")]


REFUSAL = {"code": 429, "message": "the server is overloaded", "retry_after_s": 3}


def test_a_quick_refusal_keeps_its_status() -> None:
    (_, (status, _)), (_, body), *_ = client_gets(10.0, REFUSAL, (400, JSON), b"SGLang's")
    assert status == 429
    assert json.loads(body)["error"]["retry_after_s"] == 3


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ((REFUSAL, (400, JSON), b'{"object": "error",', b' "message": "full"}'),
         {"object": "error", "message": "full"}),
        (((500, JSON), b'{"error": {"message": "no"}}'), {"message": "no"}),
        (((500, b"text/plain"), b"no JSON"), {"message": "no JSON"}),
    ],
)  # fmt: skip
def test_an_error_after_a_comment_is_an_event(
    steps: tuple[Any, ...], error: dict[str, Any]
) -> None:
    head, comment, (at_s, events), end = client_gets(20.0, *steps)
    assert (head, comment, end) == ((15, HEAD), (15, COMMENT), (20, "end"))
    event, done = events.removesuffix("\n\n").split("\n\n")
    assert (at_s, json.loads(event.removeprefix("data: "))) == (20, {"error": error})
    assert done == "data: [DONE]"


def test_a_crash_after_a_comment_ends_the_stream_with_an_event() -> None:
    *_, (_, event), end, crash = client_gets(20.0, RuntimeError("crash"))
    assert json.loads(event.split("\n\n")[0][6:])["error"]["code"] == 500
    assert (end, crash) == ((20, "end"), (20, "crash"))
    assert client_gets(RuntimeError("crash")) == [(0, "crash")]  # SGLang's app answers


@pytest.mark.parametrize(("every_ms", "interval_s"), [(math.inf, []), (500.0, [(0.5,)])])
def test_comments_are_added_to_a_server_that_wants_some(
    make_manager: Callable[..., Manager], every_ms: float, interval_s: list[tuple[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    app = Starlette()
    monkeypatch.setitem(sys.modules, HTTP_SERVER, SimpleNamespace(app=app))
    monkeypatch.setattr(state, "add_settings_route", lambda *given: None)
    make_manager(http={"comment_every_ms": every_ms})
    assert [each.args for each in app.user_middleware if each.cls is KeepsOpen] == interval_s
    note_stream(SimpleNamespace(stream=True), None)  # the Engine API
