"""Settings change while real servers run. Nothing is lost, all ranks stay in step, and only an
admin may change settings."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sage_sched.cli import main
from tests.checks.exactness import ask, crowd, differences
from tests.engine import stage
from tests.engine.crowds import ask_one
from tests.engine.kinds import settings
from tests.engine.serving import SEVERAL_HTTP_PROCESSES, SageServer, wait_until

UNDER_WAY = 48
# They alternate between policies with and without preemption, and include SGLang's own orders and a
# policy that uses the clock.
SWITCHES: tuple[dict[str, Any], ...] = (
    {"schedule_policy": "ssjf"},
    {"schedule_policy": "sage", "policy": {"sage": {"regret": 2.0}}},
    {"schedule_policy": "fastserve"},
    {"preemption": {"enabled": False}},
    {"schedule_policy": "lpm"},
    {"schedule_policy": "fastserve", "preemption": {"enabled": True}},
    {"schedule_policy": "fcfs"},
    {"schedule_policy": "proserve", "preemption": {"host_pool_gib": 0.5}},
    {"schedule_policy": "fastserve", "policy": {"fastserve": {"quantum_ms": 3.0}}},
    {"schedule_policy": "trail-prompt"},
)


@pytest.fixture
def server(two_ranks: SageServer) -> SageServer:
    settings(two_ranks, {"schedule_policy": "fastserve", "preemption": {"enabled": True}})
    return two_ranks


def test_switches_lose_nothing(server: SageServer) -> None:
    before = server.stats()
    asked = [(prompt, tokens % 24 + 2) for prompt, tokens in crowd(120)]
    with ThreadPoolExecutor(UNDER_WAY) as pool:
        answers = [pool.submit(ask_one, server, one) for one in asked]
        for number, change in enumerate(SWITCHES, 1):
            least = number * len(asked) // (len(SWITCHES) + 1)
            wait_until(lambda least=least: sum(map(Future.done, answers)) >= least, 900)
            settings(server, change)
        switched = [answer.result() for answer in answers]
    stats = server.stats()
    assert stats["num_switches"] - before["num_switches"] == len(SWITCHES)
    assert stats["num_policy_errors"] == stats["num_malformed"] == 0
    moved = stats["preemption"]
    assert moved["num_preemptions"] == moved["num_resumed"] + moved["num_recomputed"]
    num_preemptions = moved["num_preemptions"] - before["preemption"]["num_preemptions"]
    assert num_preemptions >= len(SWITCHES)
    # No more requests at a time than may run, so none yields.
    settings(server, {"schedule_policy": "fcfs"})
    alone = ask(server, asked, 6)
    assert differences(alone, switched) == (0, pytest.approx(0, abs=1e-3))
    # SGLang's check ends the server if the ranks differ. Both logs are the same.
    log = server.log.read_text().splitlines()
    first, second = (
        [line.partition(" by ")[2] for line in log if rank in line and "scheduled by" in line]
        for rank in ("TP0", "TP1")
    )
    assert first == second
    assert len(first) > len(SWITCHES)


def test_without_the_key_or_with_a_bad_value_nothing_changes(
    server: SageServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, path = settings(server), f"{server.url}/sage/settings"
    for headers in ({}, {"Authorization": "Bearer a client's"}):
        change = {"schedule_policy": "fcfs"}
        assert requests.post(path, json=change, headers=headers, timeout=1200).status_code == 401
        assert requests.get(path, headers=headers, timeout=1200).status_code == 401
    too_long = b'{"a": "' + b"x" * 70_000 + b'"}'
    answer = requests.post(path, data=too_long, headers=stage.AS_ADMIN, timeout=1200)
    assert (answer.status_code, "more than 65536 bytes" in answer.text) == (400, True)

    monkeypatch.setenv("SAGE_ADMIN_KEY", stage.ADMIN_KEY)
    command = ["set", "--url", server.url]
    assert main([*command, "policy.sage.regret=-1"]) == 2
    assert "policy.sage.regret is -1" in capsys.readouterr().err
    assert settings(server) == before
    assert main([*command, "policy.sage.regret=inf"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == settings(server) != before


@SEVERAL_HTTP_PROCESSES
def test_any_http_process_changes_the_scheduler(several: SageServer) -> None:
    # Connections go to one HTTP process or the other.
    for policy in ("ssjf", "sage", "fcfs", "ssjf"):
        settings(several, {"schedule_policy": policy})
        assert several.stats()["schedule_policy"] == policy
        assert ask_one(several, ("Hello", 3)).ids
    # SGLang itself asks for no key here.
    assert requests.post(f"{several.url}/sage/settings", json={}, timeout=300).status_code == 401
