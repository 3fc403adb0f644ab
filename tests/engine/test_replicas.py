"""Replicas of one server (--dp-size 2): SGLang gives each request a rank, and each has an order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate


@pytest.fixture
def server(replicas: SageServer) -> SageServer:
    return replicas


def rank_of(answer: Any) -> int:
    rank: int = answer["meta_info"]["dp_rank"]
    return rank


def test_no_request_is_lost_and_both_serve(server: SageServer) -> None:
    with ThreadPoolExecutor(24) as pool:
        asked = [(f"{SHORT_PROMPT} ({i})", 3 + i % 5) for i in range(48)]
        answers = list(pool.map(lambda each: generate(server, *each), asked))
    lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert all(1 <= length <= cap for length, (_, cap) in zip(lengths, asked, strict=True))
    assert {rank_of(answer) for answer in answers} == {0, 1}


def test_batches_and_samples_are_answered(server: SageServer) -> None:
    answers = generate(server, [SHORT_PROMPT] * 6, 4)
    answers += generate(server, SHORT_PROMPT, 4, sampling_params={"n": 3, "temperature": 1})
    assert len(answers) == 9


def test_a_rank_that_a_client_gives_is_honoured(server: SageServer) -> None:
    for rank in (1, 1, 0, 1):
        assert rank_of(generate(server, SHORT_PROMPT, 3, routed_dp_rank=rank)) == rank


def test_all_of_them_go_by_new_settings(server: SageServer) -> None:
    for policy in ("fcfs", "sage"):
        settings(server, {"schedule_policy": policy})
        info = requests.get(f"{server.url}/server_info", timeout=300).json()
        names = [state["sage"]["schedule_policy"] for state in info["internal_states"]]
        assert names == [policy] * 2
        assert len(generate(server, [SHORT_PROMPT] * 4, 3)) == 4
