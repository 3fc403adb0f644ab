"""Settings that change while real servers run: nothing is lost, all ranks go on alike, and who may
not change them cannot."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.checks.exactness import TWO_RANKS, Spoken, crowd, differences
from bench.servers.server import Server
from tests.engine import stage
from tests.engine.conftest import BIN, CHECKED, YIELDING, YIELDING_FLAGS
from tests.engine.crowds import ask_one
from tests.engine.serving import (
    SEVERAL_HTTP_PROCESSES,
    UNHURRIED,
    SageServer,
    wait_until,
    warmed_store,
)

NUM_REQUESTS, NUM_SWITCHES, UNDER_WAY = 1000, 20, 48
KEY = {"SAGE_ADMIN_KEY": stage.ADMIN_KEY}
# Those whose requests yield between those whose requests do not; SGLang's own orders; a clock.
SWITCHES: tuple[dict[str, Any], ...] = (
    {"schedule_policy": "ssjf"},
    {"schedule_policy": "sage", "policy": {"sage": {"regret": 2.0}}},
    {"schedule_policy": "fastserve"},
    {"preemption": {"enabled": False}},
    {"schedule_policy": "lpm"},
    {"schedule_policy": "fastserve", "preemption": {"enabled": True}},
    {"schedule_policy": "fcfs"},
    {"schedule_policy": "proserve", "preemption": {"max_yields": 3}},
    {
        "schedule_policy": "fastserve",
        "policy": {"fastserve": {"quantum_ms": 3.0}},
        "preemption": {"max_yields": 1000},
    },
    {"schedule_policy": "trail-prompt"},
)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageServer]:
    """Two ranks, with room for six requests, which yield whenever their age has doubled."""
    folder = tmp_path_factory.mktemp("switch")
    with SageServer(
        model,
        folder,
        warmed_store(folder / "store"),
        flags=[*YIELDING_FLAGS, "--tp-size", "2", "--admin-api-key", stage.ADMIN_KEY],
        env=CHECKED | TWO_RANKS,
        settings=YIELDING,
        policy="fastserve",
    ) as started:
        yield started


def settings(server: Server, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What it goes by, after a change if one is given."""
    key = {"Authorization": f"Bearer {stage.ADMIN_KEY}"}
    path = f"{server.url}/sage/settings"
    if changes is None:
        answer = requests.get(path, headers=key, timeout=300)
    else:
        answer = requests.post(path, json=changes, headers=key, timeout=300)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def asked_while_it_switches(server: Server, asked: list[tuple[str, int]]) -> list[Spoken]:
    """Their answers, UNDER_WAY at a time; a switch whenever as many more have come back as leaves
    one for each part of them."""
    every = len(asked) // (NUM_SWITCHES + 1)
    switches = cycle(SWITCHES)
    answers: list[Future[Spoken]] = []
    with ThreadPoolExecutor(UNDER_WAY) as pool:
        answers = [pool.submit(ask_one, server, one) for one in asked]
        for number in range(1, NUM_SWITCHES + 1):
            wait_until(lambda number=number: sum(map(Future.done, answers)) >= number * every, 900)
            change = next(switches)
            now = settings(server, change)
            assert now["schedule_policy"] == change.get("schedule_policy", "fastserve")
        return [answer.result() for answer in answers]


def test_of_1000_requests_none_is_lost_or_changed_by_20_switches(server: SageServer) -> None:
    asked = [(prompt, tokens % 24 + 2) for prompt, tokens in crowd(NUM_REQUESTS)]
    switched = asked_while_it_switches(server, asked)
    stats = server.stats()
    assert stats["num_switches"] == NUM_SWITCHES
    assert stats["num_policy_errors"] == stats["num_malformed"] == 0
    preemption = stats["preemption"]
    came_back = preemption["num_resumed"] + preemption["num_recomputed"]
    assert preemption["num_yields"] == came_back >= NUM_SWITCHES
    assert sum(answer.num_retractions > 0 for answer in switched) >= NUM_SWITCHES
    settings(server, {"schedule_policy": "fcfs"})
    with ThreadPoolExecutor(6) as pool:
        alone = list(pool.map(lambda one: ask_one(server, one), asked))
    num_different, largest = differences(alone, switched)
    assert num_different == 0
    assert largest < 1e-3
    # SGLang's check of the ranks ends the server where they part; both logs say the same.
    log = server.log.read_text()
    said = {
        rank: [
            line.partition(" by ")[2]
            for line in log.splitlines()
            if rank in line and "scheduled by" in line
        ]
        for rank in ("TP0", "TP1")
    }
    assert said["TP0"] == said["TP1"]
    assert len(said["TP0"]) == NUM_SWITCHES + 1


def test_those_in_host_memory_come_back_under_sglangs_own_order(server: SageServer) -> None:
    settings(server, {"schedule_policy": "fastserve", "preemption": {"enabled": True}})
    swapped: list[str] = []

    def go_by_fcfs(state: dict[str, Any]) -> None:
        swapped.extend(state["swapped"])
        settings(server, {"schedule_policy": "fcfs"})

    asked = crowd(24, seed=5)
    before = server.stats()["preemption"]
    calls = [lambda one=one: ask_one(server, one) for one in asked]
    found = stage.together(server, calls, go_by_fcfs, swapped=4)
    after = server.stats()["preemption"]
    assert len(swapped) >= 4
    assert (
        after["num_resumed"] - before["num_resumed"] == after["num_yields"] - before["num_yields"]
    )
    assert differences([ask_one(server, one) for one in asked], found)[0] == 0


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
        (b'{"schedule_policy": "sage+"}', "none was loaded at the start (probe.file)"),
        (b'{"preemption": {"max_yields": 0}}', "preemption.max_yields is 0"),
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
    assert refused.returncode == 1
    said = "sage-sched set: policy.sage.regret is -1.0, allowed: 0 to 1e+09, or inf\n"
    assert refused.stderr == said
    assert "Unauthorized" in run(SAGE_ADMIN_KEY="").stderr


@SEVERAL_HTTP_PROCESSES
def test_any_http_process_changes_all_schedulers(model: Path, tmp_path: Path) -> None:
    flags = ["--tokenizer-worker-num", "2", "--dp-size", "2"]
    with SageServer(
        model,
        tmp_path,
        warmed_store(tmp_path / "store"),
        flags=[*flags, "--admin-api-key", stage.ADMIN_KEY],
        env=CHECKED | TWO_RANKS | UNHURRIED,
    ) as several:
        # Connections go to one HTTP process or the other.
        for policy in ("ssjf", "sage", "fcfs", "ssjf"):
            settings(several, {"schedule_policy": policy})
            info = requests.get(f"{several.url}/server_info", timeout=300).json()
            names = [state["sage"]["schedule_policy"] for state in info["internal_states"]]
            assert names == [policy] * 2
            assert ask_one(several, ("Hello", 3)).ids
        # SGLang itself asks for no key here.
        answer = requests.post(f"{several.url}/sage/settings", json={}, timeout=300)
        assert answer.status_code == 401
