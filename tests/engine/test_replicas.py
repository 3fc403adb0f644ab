"""Replicas of one server (--dp-size 2): our router gives each request a rank."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests

from tests.engine import stage
from tests.engine.kinds import settings
from tests.engine.serving import (
    LONG_PROMPT,
    SHORT_PROMPT,
    SageServer,
    generate,
    wait_until,
)


@pytest.fixture
def server(replicas: SageServer) -> SageServer:
    return replicas


def router(server: SageServer) -> dict[str, Any]:
    found: dict[str, Any] = server.stats()["router"]
    return found


def rank_of(answer: Any) -> int:
    rank: int = answer["meta_info"]["dp_rank"]
    return rank


def test_a_request_goes_where_less_work_is_foreseen(server: SageServer) -> None:
    def ask(prompt: str, rank: int | None, cap: int) -> Any:
        return generate(server, prompt, cap, routed_dp_rank=rank)

    # First in this file: later the replicas have learned this host's step times.
    assert router(server)["step_time"]["source"] == "shipped"
    with ThreadPoolExecutor(4) as pool:
        with stage.held(server):
            # Told by their numbers alone the first replica has less to do.
            sent = [pool.submit(ask, LONG_PROMPT, 0, 1000)]
            sent += [pool.submit(ask, SHORT_PROMPT, 1, 1000) for _ in range(2)]
            wait_until(lambda: router(server)["num_unfinished"] == [1, 2])
            sent.append(pool.submit(ask, LONG_PROMPT, None, 1000))
            wait_until(lambda: sum(router(server)["num_unfinished"]) == 4)
            assert router(server)["num_unfinished"] == [1, 3]
            requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=300)
        for each in sent:
            each.result()


def test_gorouting_keeps_room_where_there_is_most(deadlines: SageServer) -> None:
    """ProServe, Algorithm 2: by prefill times and TTFT deadlines."""
    with ThreadPoolExecutor(6) as pool, stage.held(deadlines):
        sent: list[Future[Any]] = []

        def rank_of_next(prompt: str, given: int | None, slo_s: float) -> int:
            before = router(deadlines)["num_picked"]
            said = {"custom_params": {"ttft_slo_ms": slo_s * 1e3}}
            more: dict[str, Any] = {"routed_dp_rank": given, "sampling_params": said}
            sent.append(pool.submit(generate, deadlines, prompt, **more))
            wait_until(lambda: sum(router(deadlines)["num_unfinished"]) == len(sent))
            picked = zip(router(deadlines)["num_picked"], before, strict=True)
            return [new - old for new, old in picked].index(given is None)

        rank_of_next("first " * 70, 0, 1e6)  # 7,000 s
        rank_of_next("second " * 100, 1, 1e6)  # 10,000 s
        assert [rank_of_next(f"{n}, please!", None, 20_000.0) for n in range(2)] == [1, 1]
        assert rank_of_next("No hurry.", None, 1e6) == 0  # either is nearly idle to this one
        assert rank_of_next("Hurry.", None, 12_000.0) == 0  # and the other one full to this
        requests.post(f"{deadlines.url}/abort_request", json={"abort_all": True}, timeout=300)
    assert router(deadlines)["num_failed"] == 0


def test_no_request_is_lost_and_both_serve(server: SageServer) -> None:
    before = router(server)
    with ThreadPoolExecutor(24) as pool:
        asked = [(f"{SHORT_PROMPT} ({i})", 3 + i % 5) for i in range(48)]
        answers = list(pool.map(lambda each: generate(server, *each), asked))
    lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert all(1 <= length <= cap for length, (_, cap) in zip(lengths, asked, strict=True))
    after = router(server)
    picked = [new - old for new, old in zip(after["num_picked"], before["num_picked"], strict=True)]
    assert sum(picked) == 48
    assert picked == [sum(rank_of(answer) == rank for answer in answers) for rank in (0, 1)]
    assert min(picked) > 0
    assert after["num_unfinished"] == [0, 0]
    assert after["num_failed"] == 0


def test_batches_and_samples_have_ranks_of_their_own(server: SageServer) -> None:
    answers = generate(server, [SHORT_PROMPT] * 6, 4)
    answers += generate(server, SHORT_PROMPT, 4, sampling_params={"n": 3, "temperature": 1})
    assert len(answers) == 9
    assert router(server)["num_unfinished"] == [0, 0]


def test_a_rank_that_a_client_gives_is_honoured(server: SageServer) -> None:
    before = router(server)["num_given"]
    for rank in (1, 1, 0, 1):
        assert rank_of(generate(server, SHORT_PROMPT, 3, routed_dp_rank=rank)) == rank
    assert router(server)["num_given"] == before + 4


@pytest.mark.parametrize("rank", [2, -1, 10**6, "one", 0.5])
def test_a_rank_that_is_not_there_is_refused_and_nothing_else(
    server: SageServer, rank: object
) -> None:
    body = {"text": SHORT_PROMPT, "sampling_params": {"max_new_tokens": 3}, "routed_dp_rank": rank}
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert response.status_code in (400, 422)
    assert "rank" in response.text
    assert generate(server, SHORT_PROMPT, 3)["meta_info"]["completion_tokens"] >= 1


def test_it_goes_by_the_steps_that_a_replica_has_learned(server: SageServer) -> None:
    answers_on = 300  # more steps than it takes to learn
    generate(
        server, SHORT_PROMPT, answers_on, routed_dp_rank=1, sampling_params={"ignore_eos": True}
    )

    def goes_by_one_of_theirs() -> bool:
        info = requests.get(f"{server.url}/server_info", timeout=300).json()
        states = [state["sage"] for state in info["internal_states"]]
        ours = states[0]["router"]["step_time"]
        theirs = [state["step_time"] for state in states]
        return ours["source"] in ("kept", "learned") and any(
            ours.items() <= their.items() for their in theirs
        )

    wait_until(goes_by_one_of_theirs)


def test_an_answer_that_is_not_streamed_is_known_to_have_begun(server: SageServer) -> None:
    def num_running() -> int:
        loads = requests.get(f"{server.url}/v1/loads", timeout=300).json()["loads"]
        return int(next(load["num_running_reqs"] for load in loads if load["dp_rank"] == 0))

    with ThreadPoolExecutor(1) as pool:
        # Before the 50th token nothing is said of it.
        with stage.held(server, tokens=5):
            sent = pool.submit(
                generate, server, LONG_PROMPT, 1000, rid="begun", routed_dp_rank=0,
                sampling_params={"ignore_eos": True},
            )  # fmt: skip
            wait_until(lambda: num_running() == 1)
            assert rank_of(generate(server, SHORT_PROMPT, 3)) == 1
            assert router(server)["num_unfinished"] == [1, 0]
            assert router(server)["num_waiting"] == [0, 0]
            requests.post(f"{server.url}/abort_request", json={"rid": "begun"}, timeout=300)
        sent.result()


def test_an_aborted_request_counts_no_more(server: SageServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        with stage.held(server):
            sent = pool.submit(generate, server, LONG_PROMPT, 1000, rid="gone")
            wait_until(lambda: sum(router(server)["num_unfinished"]) == 1)
            requests.post(f"{server.url}/abort_request", json={"rid": "gone"}, timeout=300)
        sent.result()
    generate(server, SHORT_PROMPT, 3)
    wait_until(lambda: router(server)["num_unfinished"] == [0, 0])


def test_all_of_them_go_by_new_settings(server: SageServer) -> None:
    for policy in ("fcfs", "sage"):
        settings(server, {"schedule_policy": policy})
        info = requests.get(f"{server.url}/server_info", timeout=300).json()
        names = [state["sage"]["schedule_policy"] for state in info["internal_states"]]
        assert names == [policy] * 2
        assert len(generate(server, [SHORT_PROMPT] * 4, 3)) == 4


def scheduler_of(server: SageServer, rank: int) -> int:
    """Its process."""
    found = [
        child.pid
        for child in psutil.Process(server.pid).children(recursive=True)
        if f"scheduler_DP{rank}" in " ".join(child.cmdline())
    ]
    assert len(found) == 1
    return int(found[0])


def test_what_ran_on_a_killed_replica_gets_an_error_and_nothing_else_does(
    server: SageServer,
) -> None:
    # The last test that shares the server, as one of the two replicas is dead.
    def ask(rank: int | None, cap: int, **more: Any) -> requests.Response:
        body = {
            "text": SHORT_PROMPT,
            "sampling_params": {"max_new_tokens": cap, "temperature": 0, "ignore_eos": True},
            "routed_dp_rank": rank,
            **more,
        }
        return requests.post(f"{server.url}/generate", json=body, timeout=300)

    with ThreadPoolExecutor(16) as pool:
        with stage.held(server):
            doomed = [pool.submit(ask, 1, 40) for _ in range(3)]
            streamed = pool.submit(ask, 1, 40, stream=True)
            safe = [pool.submit(ask, 0, 40) for _ in range(3)]
            wait_until(lambda: router(server)["num_unfinished"] == [3, 4])
            os.kill(scheduler_of(server, 1), signal.SIGKILL)
            lost = [each.result() for each in doomed]
            assert all(response.status_code == 503 for response in lost)
            assert all("Replica 1 " in response.text for response in lost)
            assert "Replica 1 " in streamed.result().text
        answers = [each.result() for each in safe]
    assert [response.status_code for response in answers] == [200] * 3
    assert {response.json()["meta_info"]["completion_tokens"] for response in answers} == {40}
    # All requests go to the other replica, and a request for the dead one is refused.
    more = [ask(None, 5) for _ in range(4)]
    assert {rank_of(response.json()) for response in more} == {0}
    refused = ask(1, 5)
    assert (refused.status_code, "Replica 1 " in refused.text) == (503, True)
    # An abort goes to all replicas, as does what asks for their state.
    requests.post(f"{server.url}/abort_request", json={"rid": "nobody"}, timeout=300)
    assert router(server)["dead"] == [1]
    assert router(server)["num_unfinished"] == [0, 0]
    assert requests.get(f"{server.url}/health_generate", timeout=300).status_code == 200
    assert ask(None, 5).status_code == 200
