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
    parts: list[Any], aborts: list[Any], refused_at: int, degraded: str, answer: Any
) -> None:
    """What an app sends in parts, if it is refused before one of them."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        obj = SimpleNamespace()
        note_request(obj, SimpleNamespace(scope=scope))
        manager: Any = SimpleNamespace(rid_to_state={"a": SimpleNamespace(obj=obj)})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if degraded:
            scope["sage.told"]["sage_overload"] = degraded
        for number, part in enumerate(parts):
            if number == refused_at:
                for abort in aborts:
                    note_refusal(manager, abort)
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


def test_only_the_degraded_request_of_a_batch_says_so() -> None:
    info = {"sage_overload": [[], ["behind"]], "others": [[1], [2]]}
    states = [SimpleNamespace(obj=SimpleNamespace(sage=Incoming(told={}))) for _ in range(2)]
    found = [note_degraded(state, info, index) for index, state in enumerate(states)]
    assert found == [{"others": info["others"]}, info]
    assert [state.obj.sage.told for state in states] == [{}, {"sage_overload": "behind"}]
