"""Overload protection on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests

from tests.engine import stage
from tests.engine.kinds import settings
from tests.engine.serving import LONG_PROMPT, SageServer

MANY_TOKENS = 60
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": LONG_PROMPT,
        "sampling_params": {"max_new_tokens": MANY_TOKENS, "ignore_eos": True},
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": LONG_PROMPT}],
        "max_tokens": MANY_TOKENS,
        "ignore_eos": True,
    },
}


@pytest.fixture
def server(one_slot: SageServer) -> Iterator[SageServer]:
    overload = {"enabled": True, "max_ttft_ms": 2000.0}
    settings(one_slot, {"schedule_policy": "fcfs-fill", "overload": overload})
    yield one_slot
    settings(one_slot, {"overload": {"enabled": False}})


def post(server: SageServer, path: str, stream: bool, **headers: str) -> requests.Response:
    body = {"model": "default", **ROUTES[path], "stream": stream}
    return requests.post(server.url + path, json=body, headers=headers, timeout=300)


@pytest.mark.parametrize(
    ("path", "stream"), [(path, stream) for path in ROUTES for stream in (False, True)]
)
def test_late_requests_get_a_refusal(server: SageServer, path: str, stream: bool) -> None:
    one = partial(post, server, path, stream)
    dry = partial(one, **{"X-Sage-Dry-Run": "1"})
    alone = dry().json()
    assert alone["ttlt_ms"] > alone["ttft_ms"] > 0
    assert not alone["late"]
    before = server.stats()["overload"]["num_refused"]["ttft"]
    # All come before the first may start.
    served, *refused = stage.together(server, [one] * 12)
    assert (served.status_code, "retry_after_s" in served.text) == (200, False)
    for answer in refused:
        error = answer.json()["error"]
        assert int(answer.headers["Retry-After"]) == error["retry_after_s"] >= 1
        assert (answer.status_code, error["code"], error["metric"]) == (429, 429, "ttft")
        assert error["predicted_ms"] > 0.9 * error["limit_ms"] == 1800
    assert server.stats()["overload"]["num_refused"]["ttft"] == before + 11
    settings(server, {"overload": {"enabled": False}})
    unknown = dry()
    assert unknown.status_code == (200 if stream else 503)
    # SGLang's stream of a chat names no reason.
    assert ("abort" if stream else "no times are predicted") in unknown.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_requests_that_end_in_the_queue_get_a_time_to_retry(
    one_slot: SageServer, path: str, stream: bool
) -> None:
    settings(one_slot, {"schedule_policy": "fcfs"})
    one = partial(post, one_slot, path, stream)
    brief = partial(one, **{"x-llm-d-inference-ttl": "1.5ms"})
    # Twelve may queue, besides the first on an idle server.
    first, ended, *others = stage.together(one_slot, [one, brief, *[one] * 14])
    assert first.status_code == others[0].status_code == 200
    for answer, why in ((ended, "has waited for 1.5 ms"), (others[-1], "queue is full")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], why in error["message"]) == (503, 503, True)
        assert 60 >= int(answer.headers["Retry-After"]) == error["retry_after_s"] >= 1


def test_prompt_tokens_wait_up_to_a_cap(one_slot: SageServer) -> None:
    one = partial(post, one_slot, "/generate", False)
    num_tokens = one().json()["meta_info"]["prompt_tokens"]
    # The prompts are equal, and cached except for a token.
    overload = {"max_queued_tokens": 4, "enabled": False}
    settings(one_slot, {"schedule_policy": "sage", "overload": overload})
    answers = stage.together(one_slot, [one] * 12)
    settings(one_slot, {"overload": {"max_queued_tokens": 0}})
    assert num_tokens > 4
    assert [answer.status_code for answer in answers] == [200] * 4 + [503] * 8
    for answer in answers[4:]:
        assert "overload.max_queued_tokens is 4" in answer.json()["error"]["message"]
        assert 60 >= int(answer.headers["Retry-After"]) >= 1


def test_after_a_burst_in_which_the_predictor_died_an_idle_server_admits(
    server: SageServer,
) -> None:
    def ask(_: int = 0) -> int:
        return post(server, "/generate", False).status_code

    worker = server.predictor_worker()
    with ThreadPoolExecutor(64) as pool:
        statuses = pool.map(ask, range(300))
        worker.kill()
    assert {200, 429} <= {*statuses} <= {200, 429, 503}  # at times the queue is full
    assert [ask() for _ in range(5)] == [200] * 5
    assert server.stats()["overload"]["real_to_predicted"]["ttft"] > 0
