from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from patches.http.refused import RefusedResponses
from patches.messages import add_return, answer_in_abort, in_abort, too_late_in_abort
from sage_sched.batches import TooLate
from sage_sched.overload import Refusal
from tests.patches.http.conftest import Manager, generate, http_hook

NEWCOMER: Any = SimpleNamespace(ttft_s=1.5, ttlt_s=2.5)
OTHER, REFUSED, FULL, DRY, HOPELESS = (
    AbortReq(rid="a", finished_reason=reason)
    for reason in (
        {"type": "abort"},
        in_abort(Refusal("ttft", 5.0, 1.75, 2.0, 3.25)),
        {"type": "abort", "status_code": 503, "message": "The request queue is full."},
        answer_in_abort(NEWCOMER, None, "null"),
        too_late_in_abort(TooLate("b", 60.0, 2.5)),
    )
)
add_return(FULL, lambda: 6.5)
ERROR = {
    "object": "error", "type": "overloaded", "code": 429, "metric": "ttft", "predicted_ms": 5000,
    "limit_ms": 2000, "retry_after_s": 4, "message": "The server is overloaded: TTFT would be 5000 "
    "ms, and the limit is 2000 ms. Come back in 4 s.",
}  # fmt: skip
LATE = (429, {"retry-after": "4"}, [{"error": ERROR}])
NO_PLACE = (503, {"retry-after": "7"}, [{"error": {
    "object": "error", "type": "overloaded", "code": 503, "retry_after_s": 7,
    "message": "The request queue is full."}}])  # fmt: skip
NO_TIME = (400, {}, [{"error": {
    "object": "error", "type": "BadRequestError", "code": 400, "least_ms": 60000, "left_ms": 2500,
    "message": "batch 'b' cannot be done in time: it takes at least 60.0 s, and 2.5 s are left "
    "until its done_by"}}])  # fmt: skip
TIMES = (200, {}, [{"message": "a dry run", "late": 0, "ttft_ms": 1500, "ttlt_ms": 2500}])


@pytest.mark.parametrize(
    ("parts", "aborts", "refused_at", "answer"),
    [
        ([1], [REFUSED, DRY], 0, LATE),
        ([1, 2], [OTHER, REFUSED], 0, LATE),
        ([1], [FULL], 0, NO_PLACE),
        ([1], [HOPELESS], 0, NO_TIME),
        ([1], [DRY, REFUSED], 0, TIMES),  # as may be each of several samples
        ([1, 2], [], 0, (200, {}, [1, 2])),
        ([1, 2], [OTHER], 0, (200, {}, [1, 2])),
        ([1, 2], [REFUSED], 1, (200, {}, [1, 2])),
    ],
)
def test_a_client_gets(
    manager: Manager, parts: list[Any], aborts: list[Any], refused_at: int, answer: Any
) -> None:
    """Return the messages of an app that sends its answer in parts, if it is refused before one of
    them."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = SimpleNamespace(scope=scope, headers={}, _json=None)
        await manager.received(generate(rid="a"), request)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, part in enumerate(parts):
            if number == refused_at:
                for abort in aborts:
                    http_hook("_handle_abort_req")(manager, abort)
            await send({"type": "http.response.body", "body": json.dumps(part).encode()})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RefusedResponses(app, lambda: True)({"type": "http"}, app, send))
    start, *bodies = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    if length := headers.pop("content-length", ""):
        assert (headers.pop("content-type"), length) == (
            "application/json", str(len(bodies[0]["body"])),
        )  # fmt: skip
    assert (start["status"], headers, [json.loads(part["body"]) for part in bodies]) == answer


CHUNK, CREATED = b"data: {}\n\n", b"event: response.created\ndata: {}\n\n"
MESSAGE = ERROR["message"]
OF_ROUTE = {
    "generate_request": {"error": ERROR},
    "v1_responses_request": {"error": ERROR},
    "anthropic_v1_messages": {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": MESSAGE, "metric": "ttft",
                  "predicted_ms": 5000, "limit_ms": 2000, "retry_after_s": 4},
    },
    "ollama_chat": {"error": MESSAGE, "metric": "ttft", "predicted_ms": 5000, "limit_ms": 2000,
                    "retry_after_s": 4},
}  # fmt: skip


class Streamed:
    """A stream of a route, and its client's messages after the head, after the events before the
    request begins, and at the end.

    ends: by the request's refusal, by a fault that SGLang finds in it, or with its first token.
    """

    def __init__(self, manager: Manager, route: str, ends: str) -> None:
        self.manager, self.route, self.ends = manager, route, ends
        self.sent: list[dict[str, Any]] = []
        self.num_sent: list[int] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        scope["endpoint"] = SimpleNamespace(__name__=self.route)
        request = SimpleNamespace(scope=scope, headers={}, _json=None)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.num_sent.append(len(self.sent))
        if self.route == "v1_responses_request":
            await send({"type": "http.response.body", "body": CREATED})
            self.num_sent.append(len(self.sent))
        await self.manager.received(generate(rid="a"), request)
        if self.ends == "fault":
            raise ValueError("top_k is wrong")
        if self.ends == "refusal":
            http_hook("_handle_abort_req")(self.manager, REFUSED)
        await send({"type": "http.response.body", "body": CHUNK})

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def run(self, may_refuse: bool, header: bytes = b"", may_end: tuple[str, ...] = ()) -> None:
        middleware = RefusedResponses(self.app, lambda: may_refuse, may_end)
        scope = {"type": "http", "headers": [(header, b"1s")]}
        asyncio.run(middleware(scope, self.app, self.send))

    @property
    def body(self) -> bytes:
        return b"".join(part["body"] for part in self.sent[1:])


@pytest.mark.parametrize("route", OF_ROUTE)
def test_a_stream_is_refused_before_its_first_event_in_the_form_of_its_route(
    manager: Manager, route: str
) -> None:
    refused = Streamed(manager, route, "refusal")
    refused.run(True)
    assert set(refused.num_sent) == {0}
    assert (refused.sent[0]["status"], json.loads(refused.body)) == (429, OF_ROUTE[route])
    assert (b"retry-after", b"4") in refused.sent[0]["headers"]
    served = Streamed(manager, route, "first token")
    served.run(True)
    early = CREATED if route == "v1_responses_request" else b""
    assert (served.sent[0]["status"], served.body) == (200, early + CHUNK)
    assert set(served.num_sent) == {0}


@pytest.mark.parametrize("route", OF_ROUTE)
def test_the_head_goes_at_once_where_nothing_can_be_refused(manager: Manager, route: str) -> None:
    served = Streamed(manager, route, "first token")
    served.run(False)
    assert served.num_sent in ([1], [1, 2])
    ttl = b"x-llm-d-inference-ttl"
    for header, may_end, num_sent in (
        (b"x-sage-dry-run", (), 0), (ttl, (ttl.decode(),), 0), (ttl, (), 1),
    ):  # fmt: skip
        asked = Streamed(manager, route, "first token")
        asked.run(False, header, may_end)
        assert asked.num_sent[0] == num_sent


def test_a_process_learns_that_requests_are_refused_now(manager: Manager) -> None:
    """Another HTTP process may have switched it on."""
    assert (manager.sage.may_refuse, manager.rid_to_state) == (False, {})
    for other in (DRY, HOPELESS):
        http_hook("_handle_abort_req")(manager, other)
        assert not manager.sage.may_refuse
    http_hook("_handle_abort_req")(manager, REFUSED)
    assert manager.sage.may_refuse


def test_ollamas_clients_get_their_form_of_a_malformed_request(manager: Manager) -> None:
    for may_refuse, status in ((True, 400), (False, 200)):  # then the stream has begun
        wrong = Streamed(manager, "ollama_chat", "fault")
        wrong.run(may_refuse)
        found = wrong.sent[0]["status"], json.loads(wrong.body)
        assert found == (status, {"error": "top_k is wrong"})
    with pytest.raises(ValueError, match="top_k is wrong"):
        Streamed(manager, "generate_request", "fault").run(True)
