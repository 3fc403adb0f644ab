from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from patches.http.incoming import Incoming
from patches.http.refused import RefusedResponses, note_degraded, note_refusal, note_request
from patches.messages import answer_in_abort, in_abort
from sage_sched.overload import Decision, Refusal

OTHER = AbortReq(rid="a", finished_reason={"type": "abort"})
NEWCOMER: Any = SimpleNamespace(ttft_s=1.5, ttlt_s=2.5)

REFUSAL = AbortReq(rid="a", finished_reason=in_abort(Refusal("ttft", 5.0, 2.0)))
DRY = AbortReq(rid="a", finished_reason=answer_in_abort(Decision(NEWCOMER, None, None)))


def served(
    *parts: bytes, refused_at: int | None = None, abort: AbortReq = REFUSAL, degraded: str = ""
) -> list[dict[str, Any]]:
    """Return the messages that a client gets from an app that sends these parts. The request is
    refused before one of them."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        obj = SimpleNamespace()
        note_request(obj, SimpleNamespace(scope=scope))
        manager: Any = SimpleNamespace(rid_to_state={"a": SimpleNamespace(obj=obj)})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if degraded:
            scope["sage.told"]["sage_overload"] = degraded
        for number, part in enumerate(parts):
            if number == refused_at:  # as may be each of several samples
                for each in (OTHER, abort, DRY, REFUSAL):
                    note_refusal(manager, each)
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


def test_a_dry_run_gets_its_times() -> None:
    start, body = served(b"error", refused_at=0, abort=DRY)
    assert start["status"] == 200
    assert "retry-after" not in str(start["headers"])
    assert json.loads(body["body"]) == {
        "message": "a dry run", "late": 0, "ttft_ms": 1500, "ttlt_ms": 2500,
    }  # fmt: skip


@pytest.mark.parametrize("parts", [(b"answer",), (b"data: a", b"data: b")])
def test_a_degraded_request_has_a_header(parts: tuple[bytes, ...]) -> None:
    start, *found = served(*parts, degraded="cap")
    assert (b"x-sage-overload", b"cap") in start["headers"]
    assert [part["body"] for part in found] == [*parts]


def test_only_the_degraded_request_of_a_batch_says_so() -> None:
    info = {"sage_overload": [[], ["behind"]], "others": [[1], [2]]}
    states = [SimpleNamespace(obj=SimpleNamespace(sage=Incoming(told={}))) for _ in range(2)]
    found = [note_degraded(state, info, index) for index, state in enumerate(states)]
    assert [set(each) for each in found] == [{"others"}, {"others", "sage_overload"}]
    assert [state.obj.sage.told for state in states] == [{}, {"sage_overload": "behind"}]


@pytest.mark.parametrize("refused_at", [None, 1])
def test_an_answer_is_passed_on(refused_at: int | None) -> None:
    start, *parts = served(b"a", b"b", refused_at=refused_at)
    assert start["status"] == 200
    assert [part["body"] for part in parts] == [b"a", b"b"]
