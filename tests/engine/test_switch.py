"""Settings that change while real servers run: nothing is lost, all ranks go on alike, and who may
not change them cannot."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import Any

import pytest
import requests

from bench.engines.server.server import Server
from tests.checks.exactness import Spoken, crowd, differences
from tests.engine import stage
from tests.engine.crowds import ask_one
from tests.engine.kinds import BIN, settings
from tests.engine.serving import SEVERAL_HTTP_PROCESSES, SageServer, wait_until

UNDER_WAY = 48
KEY = {"SAGE_ADMIN_KEY": stage.ADMIN_KEY}
# Policies with and without preemption in turn, SGLang's own policies, and one that uses the clock.
SWITCHES: tuple[dict[str, Any], ...] = (
    {"schedule_policy": "ssjf"},
    {"schedule_policy": "sage", "policy": {"sage": {"regret": 2.0}}},
    {"schedule_policy": "fastserve"},
    {"preemption": {"enabled": False}},
    {"schedule_policy": "lpm"},
    {"schedule_policy": "fastserve", "preemption": {"enabled": True}},
    {"schedule_policy": "fcfs"},
    {"schedule_policy": "proserve", "preemption": {"host_pool_gib": 0.5}},
    {
        "schedule_policy": "fastserve",
        "policy": {"fastserve": {"quantum_ms": 3.0}},
        "preemption": {"enabled": True},
    },
    {"schedule_policy": "trail-prompt"},
)


@pytest.fixture
def server(two_ranks: SageServer) -> SageServer:
    settings(two_ranks, {"schedule_policy": "fastserve", "preemption": {"enabled": True}})
    return two_ranks


def asked_while_it_switches(
    server: Server, asked: list[tuple[str, int]], num_switches: int
) -> list[Spoken]:
    """Their answers, UNDER_WAY at a time; a switch whenever as many more have come back as leaves
    one for each part of them."""
    every = len(asked) // (num_switches + 1)
    switches = cycle(SWITCHES)
    answers: list[Future[Spoken]] = []
    with ThreadPoolExecutor(UNDER_WAY) as pool:
        answers = [pool.submit(ask_one, server, one) for one in asked]
        for number in range(1, num_switches + 1):
            wait_until(lambda number=number: sum(map(Future.done, answers)) >= number * every, 900)
            change = next(switches)
            now = settings(server, change)
            assert now["schedule_policy"] == change.get("schedule_policy", "fastserve")
        return [answer.result() for answer in answers]


@pytest.mark.parametrize(
    ("num_requests", "num_switches"),
    [(120, len(SWITCHES)), pytest.param(1000, 20, marks=pytest.mark.long)],
)
def test_switches_lose_nothing(server: SageServer, num_requests: int, num_switches: int) -> None:
    before, said_before = server.stats(), said_by_rank(server)
    asked = [(prompt, tokens % 24 + 2) for prompt, tokens in crowd(num_requests)]
    switched = asked_while_it_switches(server, asked, num_switches)
    stats = server.stats()
    assert stats["num_switches"] - before["num_switches"] == num_switches
    assert stats["num_policy_errors"] == stats["num_malformed"] == 0
    preemption = stats["preemption"]
    came_back = preemption["num_resumed"] + preemption["num_recomputed"]
    assert preemption["num_preemptions"] == came_back
    assert preemption["num_preemptions"] - before["preemption"]["num_preemptions"] >= num_switches
    assert sum(answer.num_retractions > 0 for answer in switched) >= num_switches
    settings(server, {"schedule_policy": "fcfs"})
    assert differences(asked_alone(server, asked), switched) == (0, pytest.approx(0, abs=1e-3))
    # SGLang's check of the ranks ends the server where they part; both logs say the same.
    said = {rank: lines[len(said_before[rank]) :] for rank, lines in said_by_rank(server).items()}
    assert said["TP0"] == said["TP1"]
    assert len(said["TP0"]) == num_switches + 1


def asked_alone(server: Server, asked: list[tuple[str, int]]) -> list[Spoken]:
    """Answers without preemption: no more at a time than may run."""
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda one: ask_one(server, one), asked))


def said_by_rank(server: Server) -> dict[str, list[str]]:
    """Lines of the log that name a schedule, by rank."""
    lines = server.log.read_text().splitlines()
    return {
        rank: [
            line.partition(" by ")[2] for line in lines if rank in line and "scheduled by" in line
        ]
        for rank in ("TP0", "TP1")
    }


def test_those_in_host_memory_come_back_under_sglangs_own_order(server: SageServer) -> None:
    swapped: list[str] = []

    def go_by_fcfs(state: dict[str, Any]) -> None:
        swapped.extend(state["swapped"])
        settings(server, {"schedule_policy": "fcfs"})

    asked = crowd(16, seed=5)
    before = server.stats()["preemption"]
    calls = [lambda one=one: ask_one(server, one) for one in asked]
    found = stage.together(server, calls, go_by_fcfs, swapped=4)
    after = server.stats()["preemption"]
    assert len(swapped) >= 4
    assert (
        after["num_resumed"] - before["num_resumed"]
        == after["num_preemptions"] - before["num_preemptions"]
    )
    assert differences(asked_alone(server, asked), found)[0] == 0


def test_whoever_has_no_key_or_asks_for_what_cannot_be_changes_nothing(server: SageServer) -> None:
    before = settings(server)
    path = f"{server.url}/sage/settings"
    for headers in ({}, {"Authorization": "Bearer a client's"}):
        assert requests.post(path, json={}, headers=headers, timeout=60).status_code == 401
        assert requests.get(path, headers=headers, timeout=60).status_code == 401
    key = {"Authorization": f"Bearer {stage.ADMIN_KEY}"}
    for body, why in (
        (b"[]", "no JSON object"),
        (b"{", "no JSON object"),
        (b"[" * 60_000, "no JSON object"),
        (b'{"a": "' + b"x" * 70_000 + b'"}', "more than 65536 bytes"),
        (b'{"preemption": {"host_pool_gib": -1}}', "preemption.host_pool_gib is -1"),
        (b'{"schedule_policy": "srpt-oracle"}', "schedule_policy is 'srpt-oracle', allowed: "),
    ):
        answer = requests.post(path, data=body, headers=key, timeout=60)
        assert (answer.status_code, why in answer.json()["error"]) == (400, True), answer.text
    assert settings(server) == before


def test_the_command_shows_changes_and_says_why_not(server: SageServer) -> None:
    def run(*changes: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "sage-sched"), "set", "--url", server.url, *changes]
        return subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, check=False
        )

    done = run("schedule_policy=sage", "policy.sage.regret=inf", **KEY)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policy"]["sage"]["regret"] == "inf"
    assert json.loads(run(**KEY).stdout) == settings(server)
    refused = run("policy.sage.regret=-1", **KEY)
    assert refused.returncode == 2
    assert refused.stderr.startswith("sage-sched set: policy.sage.regret is -1, allowed: ")
    assert "Unauthorized" in run(SAGE_ADMIN_KEY="").stderr


@SEVERAL_HTTP_PROCESSES
def test_any_http_process_changes_the_scheduler(several: SageServer) -> None:
    # Connections go to one HTTP process or the other.
    for policy in ("ssjf", "sage", "fcfs", "ssjf"):
        settings(several, {"schedule_policy": policy})
        assert several.stats()["schedule_policy"] == policy
        assert ask_one(several, ("Hello", 3)).ids
    # SGLang itself asks for no key here.
    answer = requests.post(f"{several.url}/sage/settings", json={}, timeout=300)
    assert answer.status_code == 401
