"""Requests to servers, and runs that must not be counted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bench.engines.baseline import Saturation
from bench.engines.clock.device import Device
from bench.engines.server.client import Answer
from bench.engines.server.kept_server import KeptServer, Run
from bench.engines.server.policy_server import CPU_MODEL
from bench.experiment import servers as module
from bench.experiment.servers import Ran, Servers
from bench.experiment.simulated import Loaded
from bench.experiment.spec import Experiment, Load, Options
from bench.policies.arm import Arm
from bench.simulator.presets import PRESETS
from bench.simulator.request import SimRequest
from bench.workloads.forced_length import LENGTH_KEY
from bench.workloads.prompts import WorkloadError
from bench.workloads.two_kinds import LS_URGENCY
from predictor_store.data.warm import Observation
from sage_sched.app.config import SageConfig, StoreConfig
from sage_sched.fields import ConfigError
from sage_sched.job import DEFAULT_URGENCY, Hints
from tests.bench.engines.server.test_client import REQUEST

SHARED = replace(
    REQUEST, hints=Hints(session="one", urgency=LS_URGENCY, ttft_slo_ms=9.0), spans=((7, 0, 40),)
)
LONGER = replace(SHARED, input_tokens=60, spans=((7, 0, 40), (8, 0, 20)), follows=0, pause_s=3.0)
ANSWERED = Answer(0.5, ((1.0, 1), (2.0, 2), (4.5, 9)), 40, 7)


SAGE = Arm(policy="sage")


def servers_of(engine: str = "clock", arm: Arm = SAGE, **load: Any) -> Servers:
    of = Load(**{"name": "any", "rate": "1", "workload": {"name": "two kinds"}, **load})
    experiment = Experiment(name="any", title="", arms=[arm], loads=[of], engine=engine)
    return Servers(experiment, Loaded(of, None), Options())


def ran(monkeypatch: pytest.MonkeyPatch, run: Run) -> tuple[dict[str, Any], Ran]:
    """Return the requests sent and the run, if a server gives these answers."""
    sent: dict[str, Any] = {}

    def serve(kept: KeptServer, name: str, send: Any, prepare: Any = None) -> Run:
        send("")
        return run

    def drive(url: str, bodies: Any, arrivals_s: Any, **more: Any) -> None:
        sent.update(bodies=bodies, **more)

    monkeypatch.setattr(module, "drive", drive)
    monkeypatch.setattr(KeptServer, "run", serve)
    servers = servers_of()
    monkeypatch.setattr(servers, "servers_of", lambda arm: None)
    monkeypatch.setattr(servers, "_facts", lambda servers: {})
    return sent, servers._serve(SAGE, [SHARED, LONGER], "any")


def test_a_server_gets_the_hints_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, found = ran(monkeypatch, Run([ANSWERED] * 2, {}, None, ""))
    first, second = sent["bodies"]
    assert len(second["input_ids"]) == 60
    assert second["input_ids"][:40] == first["input_ids"]
    said = {LENGTH_KEY: 9, "session": "one", "urgency": LS_URGENCY, "ttft_slo_ms": 9 / 4}
    assert first["sampling_params"]["custom_params"] == said
    assert first["priority"] == DEFAULT_URGENCY - LS_URGENCY
    assert (sent["follows"], sent["pauses_s"], sent["speed"]) == ([None, 0], [0.0, 3.0], 4.0)
    assert found.served is not None
    assert found.served.cached_tokens == 14
    assert found.about["requests"] == {
        "class": ["any"] * 2, "input_tokens": [40, 60], "output_tokens": [9, 9],
        "sent_ms": [500] * 2, "ttft_ms": [500] * 2, "e2e_latency_ms": [4000] * 2,
        "pauses_s": [[]] * 2,
    }  # fmt: skip


def test_an_arm_s_servers_have_its_settings_and_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only another store needs a new history."""
    made, warmed = list[dict[str, Any]](), list[Any]()

    def servers_in(folder: Path, sage: SageConfig, device: Device, **more: Any) -> Any:
        made.append({"sage": sage, "device": device, **more})
        return SimpleNamespace(warm=lambda observations: warmed.append((sage.store, observations)))

    monkeypatch.setattr(module, "write_model", lambda folder, **shape: (folder, shape))
    monkeypatch.setattr(module, "servers_in", servers_in)
    servers, small = servers_of(), {"store": {"capacity": 9}}
    arms = (Arm(policy="fcfs", engine={"kv_pool_tokens": 5000}), SAGE, SAGE,
            Arm(policy="sage", settings=small))  # fmt: skip
    for arm in arms:
        servers.servers_of(arm)
    of_stock, *_, of_small = made
    pool = replace(PRESETS["h800-qwen3-32b"], kv_pool_tokens=5000)
    assert of_stock["device"] == Device("h800-qwen3-32b", 4.0, pool)
    shape = {**CPU_MODEL, "vocab_size": 16384, "context_length": 5000}
    assert of_stock["model"] == (Path("results/any/model"), shape)
    assert of_stock["flags"] == ("--stream-interval", "16")
    assert (of_small["sage"].slo.trust, of_small["sage"].hints.trust) == ("body", "body")
    answers = [Observation(f"step {i}", n) for i, n in enumerate((16, 32, 64))]
    assert warmed == [(made[1]["sage"].store, answers), (StoreConfig(capacity=9), answers)]


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (Run([ANSWERED], {}, None, "late"), "late"),
        (Run([Answer(0.0, error="no")], {}, None, ""), "1 of 1 requests failed: no"),
    ],
)
def test_a_run_that_must_not_be_counted_has_no_figures(
    run: Run, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = ran(monkeypatch, run)
    assert (found.served, found.problem) == (None, problem)


@pytest.mark.parametrize(
    ("engine", "arm", "load", "message"),
    [
        ("server", {}, {"workload": {"name": "two kinds"}}, "has no prompts"),
        ("server", {"engine": {"page_size": 16}}, {}, "cannot differ"),
        ("clock", {"engine": {"page_size": 16}}, {}, ""),
        ("clock", {"predictor": "none"}, {}, "cannot differ"),
        ("clock", {}, {"nodes": 2}, "cannot differ"),
    ],
)
def test_servers_differ_as_servers_can(
    engine: str, arm: dict[str, Any], load: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        servers_of(engine, Arm(policy="sage", **arm), **{"workload": {"name": "chats"}, **load})


def test_a_server_is_warmed_up_and_asked_for_its_times_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[tuple[str, int]]] = []

    def ask(self: Servers, url: str, probes: list[tuple[str, int]]) -> list[Answer]:
        asked.append(probes)
        return [Answer(0.0, ((1.0, 1), (1.0 + n / 10, n)), len(prompt)) for prompt, n in probes]

    monkeypatch.setattr(Servers, "_ask", ask)
    servers = servers_of("server", workload={"name": "chats"})
    for each in (servers, servers, servers_of("clock", workload={"name": "chats"})):
        each._prepare("")
    warm, *alone, again, on_clock = asked
    assert [n for _, n in warm] == [7, 18, 20, 22, 25, 39, 56, 86]  # the shortest of 24
    assert warm == again == on_clock
    assert [n for ((_, n),) in alone] == [16, 16, 64, 64, 256, 256]
    assert [len(prompt) for ((prompt, _),) in alone] == [46, 274] * 3
    assert servers._alone_s(SAGE)(46, 64) == pytest.approx(1.0 + 6.4, rel=0.01)


def test_a_capacity_is_measured_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Arm, int]] = []

    def serve(self: Servers, arm: Arm, requests: list[SimRequest], label: str) -> Ran:
        served.append((arm, len(requests)))
        assert self._workload is not None
        history = {each.prompt for each in self._workload.history}
        assert {each.prompt for each in requests} <= history  # later runs ask others
        return Ran(None, "late") if len(requests) < 3 else Ran(cast("Any", "served"))

    def sustained(serve: Any, num_arrivals: Any) -> Saturation:
        assert [num_arrivals(rate) for rate in (1e-3, 1.0, 1e3)] == [300, 1200, 1500]
        return Saturation(len(serve(np.zeros(3))), 1.0)

    monkeypatch.setattr(Servers, "_serve", serve)
    monkeypatch.setattr(module, "sustained", sustained)
    chats = {"name": "chats"}
    arm = Arm(policy="hrrn@clip=64", label="ours")
    servers = servers_of("server", arm, workload=chats, capacity_by="hrrn@clip=64")
    assert servers.sustained().capacity == len("served")
    assert served == [(Arm(policy="fcfs@clip=64"), 3)]


def test_no_prompt_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SimRequest] = []
    monkeypatch.setattr(Servers, "_serve", lambda _, arm, requests, label: asked.extend(requests))
    many = {"workload": {"name": "chats"}, "num_requests": 10_000}
    servers_of(arrivals="sustained", **many).run(Arm(policy="fcfs"), 0)
    assert 200 < len(asked) == len({request.prompt for request in asked})
    with pytest.raises(WorkloadError, match="needs 10000 prompts"):
        servers_of(arrivals="pulse", **many).run(Arm(policy="fcfs"), 0)
