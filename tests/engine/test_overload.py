"""Overload protection on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.engine.serving import LONG_PROMPT, SageServer

# One request runs at a time. By these step times a second one comes far too late.
SETTINGS = """
[overload]
enabled = true
max_ttft_ms = 2000.0
[step_time]
decode_base_ms = 1000.0
"""
MANY_TOKENS = 300
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


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageServer]:
    folder = tmp_path_factory.mktemp("overload")
    flags = ["--max-running-requests", "1"]
    with SageServer(model, folder, flags=flags, settings=SETTINGS, policy="fcfs-fill") as server:
        yield server


def post(server: SageServer, path: str, *, stream: bool) -> requests.Response:
    body = {"model": "default", **ROUTES[path], "stream": stream}
    return requests.post(server.url + path, json=body, timeout=300)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_refused_request_hears_when_to_come_back_and_why(
    server: SageServer, path: str, stream: bool
) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(lambda _: post(server, path, stream=stream), range(12))]
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert served
    assert refused
    assert len(served) + len(refused) == 12
    for answer in refused:
        error = answer.json()["error"]
        assert int(answer.headers["Retry-After"]) == error["retry_after_s"] >= 1
        assert (error["code"], error["metric"]) == (429, "ttft")
        assert error["predicted_ms"] > error["limit_ms"] >= 1800
    for answer in served:
        assert "retry_after_s" not in answer.text


def test_one_after_another_nothing_is_refused(server: SageServer) -> None:
    before = server.stats()["overload"]["num_refused"]["ttft"]
    for stream in (False, True):
        assert post(server, "/generate", stream=stream).status_code == 200
    found = server.stats()["overload"]
    assert found["num_refused"]["ttft"] == before
    assert found["real_to_predicted"]["ttft"] > 0


def test_after_a_burst_in_which_the_predictor_died_an_idle_server_admits(
    server: SageServer,
) -> None:
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    body = {"text": LONG_PROMPT, "sampling_params": sampling}

    def ask(_: int = 0) -> int:
        return requests.post(f"{server.url}/generate", json=body, timeout=300).status_code

    worker = server.predictor_worker()
    with ThreadPoolExecutor(64) as pool:
        statuses = pool.map(ask, range(300))
        worker.kill()
    assert {*statuses} == {200, 429}
    assert [ask() for _ in range(5)] == [200] * 5
