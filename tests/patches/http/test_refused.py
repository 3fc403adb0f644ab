from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from patches.http.incoming import Incoming
from patches.http.refused import RefusedResponses
from patches.messages import answer_in_abort, in_abort
from sage_sched.overload import Decision, Refusal
from tests.patches.http.conftest import Manager, generate, http_hook

NEWCOMER: Any = SimpleNamespace(ttft_s=1.5, ttlt_s=2.5)
OTHER, REFUSED, DRY = (
    AbortReq(rid="a", finished_reason=reason)
    for reason in (
        {"type": "abort"},
        in_abort(Refusal("ttft", 5.0, 1.75)),
        answer_in_abort(Decision(NEWCOMER, None, None)),
    )
)
ERROR = {
    "object": "error", "type": "overloaded", "code": 429, "metric": "ttft", "predicted_ms": 5000,
    "limit_ms": 1750, "retry_after_s": 4, "message": "The server is overloaded: TTFT would be 5000 "
    "ms, which is above 1750 ms. Come back in 4 s.",
}  # fmt: skip
LATE = (429, {"retry-after": "4"}, [{"error": ERROR}])
TIMES = (200, {}, [{"message": "a dry run", "late": 0, "ttft_ms": 1500, "ttlt_ms": 2500}])
CAPPED, PLAIN = {"x-sage-overload": "cap"}, {}


@pytest.mark.parametrize(
    ("parts", "aborts", "refused_at", "degraded", "answer"),
    [
        ([1], [REFUSED, DRY], 0, "", LATE),
        ([1, 2], [OTHER, REFUSED], 0, "", LATE),
        ([1], [DRY, REFUSED], 0, "", TIMES),  # as may be each of several samples
        ([1], [], 0, "cap", (200, CAPPED, [1])),
        ([1, 2], [], 0, "cap", (200, CAPPED, [1, 2])),
        ([1, 2], [], 0, "", (200, PLAIN, [1, 2])),
        ([1, 2], [OTHER], 0, "", (200, PLAIN, [1, 2])),
        ([1, 2], [REFUSED], 1, "", (200, PLAIN, [1, 2])),
    ],
)
def test_a_client_gets(
    manager: Manager, parts: list[Any], aborts: list[Any], refused_at: int, degraded: str,
    answer: Any,
) -> None:  # fmt: skip
    """What an app sends in parts, if it is refused before one of them."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = SimpleNamespace(scope=scope, headers={}, _json=None)
        await manager.received(generate(rid="a"), request)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if degraded:
            scope["sage.told"]["sage_overload"] = degraded
        for number, part in enumerate(parts):
            if number == refused_at:
                for abort in aborts:
                    http_hook("_handle_abort_req")(manager, abort)
            await send({"type": "http.response.body", "body": json.dumps(part).encode()})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RefusedResponses(app)({"type": "http"}, app, send))
    start, *bodies = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    if length := headers.pop("content-length", ""):
        assert (headers.pop("content-type"), length) == (
            "application/json", str(len(bodies[0]["body"])),
        )  # fmt: skip
    assert (start["status"], headers, [json.loads(part["body"]) for part in bodies]) == answer


def test_only_the_degraded_request_of_a_batch_says_so(manager: Manager) -> None:
    info = {"sage_overload": [[], ["behind"]], "others": [[1], [2]]}
    states = [SimpleNamespace(obj=SimpleNamespace(sage=Incoming(told={}))) for _ in range(2)]
    found: list[Any] = []
    for index, state in enumerate(states):
        update = http_hook("update_request_meta_info")
        update(lambda *args: found.append(args[1:]), manager, {}, state, info, index, None)
    assert found == [
        ({}, states[0], {"others": info["others"]}, 0, None), ({}, states[1], info, 1, None),
    ]  # fmt: skip
    assert [state.obj.sage.told for state in states] == [{}, {"sage_overload": "behind"}]
