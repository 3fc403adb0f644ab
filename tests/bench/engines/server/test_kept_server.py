"""Runs on servers that stay: which runs are repeated, and which counts are reported."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engines.clock.device import Device
from bench.engines.server import kept_server, policy_server
from bench.engines.server.client import Answer
from bench.engines.server.facts import host_facts
from bench.engines.server.fit import as_yaml
from bench.engines.server.kept_server import KeptServer, Run
from bench.engines.server.policy_server import (
    COMMON_FLAGS,
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_FLAGS,
    PolicyServers,
    counters_between,
    internal_state,
)
from bench.engines.server.server import Server, ServerError
from predictor_store.config_file import read_config
from sage_sched.app.config import SageConfig
from sage_sched.errors import UserError
from tests.bench.engines.clock.test_device_clock import state


def held_up(
    monkeypatch: pytest.MonkeyPatch, *late_s: float, num_unpredicted: int = 0
) -> tuple[Run, list[str]]:
    """Return the result and the requests sent, if the host delays each try by these seconds."""
    states = iter(s for late in late_s for s in (_did(0.0, 0), _did(late, num_unpredicted)))
    servers: Any = SimpleNamespace(device=Device.named("h800-qwen3-32b", 1.0))
    kept, sent = KeptServer(servers, "sage"), list[str]()
    monkeypatch.setattr(kept, "_get", lambda name: SimpleNamespace(url="sage"))
    monkeypatch.setattr(kept_server, "internal_state", lambda _: next(states))

    def send(url: str) -> list[Answer]:
        sent.append(url)
        return [Answer(0.0, ((2.0, 9),))] * 50

    return kept.run("any", send, prepare=lambda url: sent.append("prepared")), sent


def _did(late_s: float, num_unpredicted: int) -> dict[str, Any]:
    did = state(device_s=100.0 if late_s else 0.0, late_s=late_s)
    return did | {"sage": {"predictor": {"num_deadline_misses": num_unpredicted}}}


@pytest.mark.parametrize(
    ("late_s", "num_unpredicted", "num_tries", "problem"),
    [
        ((30.0, 2.0), 1, 2, ""),
        ((30.0, 30.0, 29.0, 0.0), 0, 3, "29.0 s of 100.0 s"),
        ((1.0, 1.0, 1.0), 2, 3, "2 of 50 requests went on without a prediction"),
    ],
)
def test_a_run_that_the_host_delayed_is_repeated(
    late_s: tuple[float, ...],
    num_unpredicted: int,
    num_tries: int,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, sent = held_up(monkeypatch, *late_s, num_unpredicted=num_unpredicted)
    assert sent == ["prepared", "sage"] * num_tries
    assert problem in run.late
    assert bool(run.late) == bool(problem)
    assert run.use is not None
    assert run.use.late_s == late_s[num_tries - 1]


@pytest.mark.parametrize(
    ("stays", "runs", "events"),
    [
        (True, True, "starts, is reset, ends"),
        (True, False, "starts, ends, starts, ends"),
        (False, True, "starts, ends, starts, ends"),
    ],
)
def test_a_server_stays_on_a_device_clock_while_it_runs(
    stays: bool, runs: bool, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = list[str]()

    class Stub(SimpleNamespace):
        def __enter__(self) -> Stub:
            log.append("starts")
            return self

    stub = Stub(url="", running=lambda: runs, kill=lambda: log.append("ends"))
    device = Device.named("h800-qwen3-32b", 1.0) if stays else None
    servers: Any = SimpleNamespace(device=device, server=lambda policy, name: stub)
    monkeypatch.setattr(kept_server, "internal_state", lambda _: state())
    monkeypatch.setattr(kept_server, "reset", lambda _: log.append("is reset"))
    monkeypatch.setattr(kept_server, "hurry_predictions", lambda _: None)
    kept = KeptServer(servers, "sage")
    for name in ("one", "another"):
        kept.run(name, lambda url: [])
    kept.close()
    assert ", ".join(log) == events


def test_the_clocks_of_all_replicas_and_our_counters_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [state(num_steps=2.0) | {"name": "first"}, state(num_steps=3.0)]
    answer = SimpleNamespace(json=lambda: {"internal_states": states})
    monkeypatch.setattr(policy_server.requests, "get", lambda url, timeout: answer)
    server: Any = SimpleNamespace(url="")
    assert internal_state(server) == state(num_steps=5.0) | {"name": "first"}
    before = {"num_passes": 3, "predictor": {"num_records": 7, "worker_alive": True}}
    after = {
        "num_passes": 5, "error": 0.5, "decisions": {"num_yields": 2},
        "predictor": {"num_records": 9, "worker_alive": True, "num_late": 4},
    }  # fmt: skip
    assert counters_between({"sage": before}, {"sage": after}) == after | {"num_passes": 2}
    assert counters_between({}, {}) == {}


def test_servers_have_the_given_flags_and_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_server, "go_first", lambda: None)
    clock = Device.named("h800-qwen3-32b", 1.0)
    for device, flags, wanted in (
        (None, None, (CPU_FLAGS, CPU_ENV)),
        (None, ("--x",), (("--x",), {"A": "1"})),
        (clock, None, (CPU_ENGINE_FLAGS, CPU_ENV)),
        (clock, ("--x",), ((*CPU_ENGINE_FLAGS, "--x"), CPU_ENV)),
    ):
        about: dict[str, Any] = {"model": Path("m"), "flags": flags, "env": {"A": "1"}}
        found = policy_server.servers_in(Path(), SageConfig(), device, **about)
        assert (found.flags, found.env) == wanted


@pytest.mark.parametrize("speed", [None, 4.0])
def test_a_server_has_the_flags_and_settings_of_its_policy(
    speed: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(policy_server, "Server", lambda *of, **more: made.append((of, more)))
    device = speed and Device.named("h800-qwen3-32b", speed)
    sage = SageConfig.parse({"predictor": {"deadline_ms": 800.0}})
    servers = PolicyServers(
        model=Path("m"), folder=tmp_path, flags=("--x",), env={"A": "1"}, sage=sage, device=device
    )
    for policy in ("sage", "fcfs@conservativeness=0.3,clip=9"):
        servers.server(policy, f"{policy} 2x")
    own = () if device is None else device.flags()
    ours = ["--sage-config", str(tmp_path / "sage.yaml")]
    stock = ["fcfs", "--schedule-conservativeness", "0.3", *own]
    for ((_, flags), more), of_policy, name in zip(
        made, (["sage", *own, *ours], stock), ("sage-2x", "fcfs@conservativeness=0.3,clip=9-2x"),
        strict=True,
    ):  # fmt: skip
        assert flags == [*COMMON_FLAGS, "--schedule-policy", *of_policy, "--x"]
        assert more["log"] == tmp_path / "logs" / f"{name}.log"
        assert more["env"]["A"] == "1"
        assert more["env"]["PYTHONPATH"]
        assert ("BENCH_DEVICE_CLOCK" in more["env"]) == (device is not None)
    assert more["env"]["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] == "9"
    config = read_config(ours[1])
    assert config.predictor.deadline_ms == 800.0 / (speed or 1.0)
    assert (config.store.path, config.store.on_disk) == (str(tmp_path / "store"), False)


@pytest.mark.parametrize(
    ("code", "start_timeout_s", "said"),
    [
        ("print('no memory')", 60.0, "the server ended while starting:\nno memory"),
        ("import time; time.sleep(99)", 0.0, "the server did not answer in 0 s"),
    ],
)
def test_a_server_that_does_not_come_up_is_an_error(
    code: str, start_timeout_s: float, said: str, tmp_path: Path
) -> None:
    command, log = (sys.executable, "-c", code), tmp_path / "deep" / "log"
    beside, server = (
        Server(Path("m"), log=log, command=command, start_timeout_s=start_timeout_s)
        for _ in range(2)
    )
    assert beside.port != server.port
    with pytest.raises(ServerError, match=said), server:
        pytest.fail("it is up")
    assert (server.pid, server.running()) == (None, False)


def test_facts_behind_numbers_are_named() -> None:
    facts = host_facts()
    assert {name for name, found in facts.items() if not found} <= {"commit", "sage-sched"}
    assert facts["gpu"] == "none"
    with pytest.raises(UserError, match="3 steps are too few"):
        as_yaml({"error": None, "num_steps": 3})
