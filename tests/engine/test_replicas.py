"""Replicas of one server (--dp-size 2): SGLang gives each request a rank, and each has an order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, states


def test_both_serve_and_lose_nothing(replicas: SageServer) -> None:
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda i: generate(replicas, f"{SHORT_PROMPT} ({i})"), range(48)))
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
    samples = generate(replicas, SHORT_PROMPT, sampling_params={"n": 3, "temperature": 1})
    assert len(samples) == 3


def test_clients_may_name_a_rank(replicas: SageServer) -> None:
    for rank in (1, 1, 0, 1):
        answer = generate(replicas, SHORT_PROMPT, routed_dp_rank=rank)
        assert answer["meta_info"]["dp_rank"] == rank


def test_all_replicas_go_by_new_settings(replicas: SageServer) -> None:
    for policy in ("fcfs", "sage"):
        settings(replicas, {"schedule_policy": policy})
        assert [state["sage"]["schedule_policy"] for state in states(replicas)] == [policy] * 2
        assert len(generate(replicas, [SHORT_PROMPT] * 4)) == 4
