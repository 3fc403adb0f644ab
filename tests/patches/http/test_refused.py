"""The answer to a refused request takes the place of SGLang's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from patches.http.refused import RefusedResponses
from patches.messages import in_abort, refusal_in
from sage_sched.overload import Refusal

TOLD = refusal_in(AbortReq(rid="a", finished_reason=in_abort(Refusal("ttft", 5.0, 2.0))))


def served(*parts: bytes, refused_at: int | None = None) -> list[dict[str, Any]]:
    """Return the messages that a client gets from an app that sends these parts. The request is
    refused before one of them."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if refused_at != 0 or parts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, part in enumerate(parts):
            if number == refused_at:
                scope["sage.refusal"].append(TOLD)
            more = number + 1 < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RefusedResponses(app)({"type": "http"}, app, send))
    return sent


@pytest.mark.parametrize("parts", [(b"error",), (b"data: error", b"[DONE]")])
def test_a_refusal_takes_its_place(parts: tuple[bytes, ...]) -> None:
    start, body = served(*parts, refused_at=0)
    assert start["status"] == 429
    assert (b"retry-after", b"3") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert (error["code"], error["metric"], error["predicted_ms"]) == (429, "ttft", 5000)


@pytest.mark.parametrize("refused_at", [None, 1])
def test_an_answer_is_passed_on(refused_at: int | None) -> None:
    """Also once it has begun: of several samples one may be refused later."""
    start, *parts = served(b"a", b"b", refused_at=refused_at)
    assert start["status"] == 200
    assert [part["body"] for part in parts] == [b"a", b"b"]


def test_other_aborts_are_no_refusals() -> None:
    assert refusal_in(AbortReq(rid="a", finished_reason={"type": "abort"})) is None
    assert refusal_in(AbortReq(rid="a")) is None
