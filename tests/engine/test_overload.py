"""Overload protection on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.engine.kinds import settings
from tests.engine.serving import LONG_PROMPT, SageServer, generate

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


def post(
    server: SageServer, path: str, *, stream: bool, headers: dict[str, str] | None = None
) -> requests.Response:
    body = {"model": "default", **ROUTES[path], "stream": stream}
    return requests.post(server.url + path, json=body, headers=headers, timeout=300)


def post_many(server: SageServer, path: str, *, stream: bool) -> list[requests.Response]:
    with ThreadPoolExecutor(12) as pool:
        return [*pool.map(lambda _: post(server, path, stream=stream), range(12))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_refused_request_hears_when_to_come_back_and_why(
    server: SageServer, path: str, stream: bool
) -> None:
    answers = post_many(server, path, stream=stream)
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("action", ["cap", "behind"])
def test_a_late_request_is_degraded_and_says_so(
    server: SageServer, action: str, path: str, stream: bool
) -> None:
    # The fifth whole answer would be late; many short ones after four would not.
    changes = {"action": action, "cap_tokens": 3, "max_ttft_ms": 1.15e6, "max_tpot_ms": 1.0}
    settings(server, {"overload": changes})
    answers = post_many(server, path, stream=stream)
    settings(server, {"overload": {"action": "refuse", "max_ttft_ms": 2000.0}})
    assert {answer.status_code for answer in answers} == {200}
    degraded = [answer for answer in answers if "x-sage-overload" in answer.headers]
    assert 0 < len(degraded) < 12
    assert {answer.headers["x-sage-overload"] for answer in degraded} == {action}
    if path == "/generate":
        for answer in answers:
            assert (f'"sage_overload":["{action}"]' in answer.text) == (answer in degraded)
    if path == "/generate" and not stream:
        lengths = {answer.json()["meta_info"]["completion_tokens"] for answer in degraded}
        assert lengths == {3 if action == "cap" else MANY_TOKENS}


def test_a_list_says_which_of_its_prompts_were_degraded(server: SageServer) -> None:
    settings(server, {"overload": {"action": "cap", "cap_tokens": 3, "max_ttft_ms": 1.15e6}})
    ask = partial(generate, server, sampling_params={"ignore_eos": True})
    with ThreadPoolExecutor(6) as pool:
        lists = [*pool.map(lambda _: ask([LONG_PROMPT, LONG_PROMPT], MANY_TOKENS), range(6))]
    settings(server, {"overload": {"action": "refuse", "max_ttft_ms": 2000.0}})
    found = [answer["meta_info"] for answers in lists for answer in answers]
    for about in found:
        is_short = about["completion_tokens"] == 3
        assert about.get("sage_overload") == (["cap"] if is_short else None)
    assert 0 < sum("sage_overload" in about for about in found) < 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_dry_run_tells_what_a_request_would_wait(
    server: SageServer, path: str, stream: bool
) -> None:
    asks = partial(post, server, path, stream=stream, headers={"X-Sage-Dry-Run": "1"})
    alone = asks()
    assert alone.status_code == 200
    assert alone.json()["ttlt_ms"] > alone.json()["ttft_ms"] > 0
    assert not alone.json()["late"]
    settings(server, {"overload": {"enabled": False}})
    unknown = asks()
    settings(server, {"overload": {"enabled": True}})
    assert unknown.status_code == (200 if stream else 503)
    # SGLang's stream of a chat names no reason.
    assert ("abort" if stream else "no times are predicted") in unknown.text


def test_a_load_has_the_times_of_a_typical_request(server: SageServer) -> None:
    assert post(server, "/generate", stream=False).status_code == 200
    (load,) = requests.get(f"{server.url}/v1/loads", timeout=300).json()["loads"]
    assert load["sage"]["ttlt_ms"] > load["sage"]["ttft_ms"] > 0
    assert load["sage"]["late"] == 0
    asked = {"format": "prometheus", "include": "sage"}
    text = requests.get(f"{server.url}/v1/loads", asked, timeout=300).text
    assert 'sglang_sage_ttft_ms{dp_rank="0"}' in text


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
