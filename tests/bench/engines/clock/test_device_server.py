"""Comparisons on the device clock, small, on real servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import requests

from bench.engines.clock.device import Device
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    PolicyServers,
    scheduler_state,
)
from bench.engines.server.server import Server, ServerError
from bench.engines.server.side_by_side import Settings, compare_policies
from bench.simulator.presets import Engine
from bench.simulator.result import alone_s
from bench.workloads import chats
from sage_sched.config import SageConfig, StepTimeConfig
from sage_sched.steps import StepTime

pytestmark = pytest.mark.server

# Steps that any host computes in time.
SLOW = Engine(
    StepTime(0.2, 0.0, 1e-4, 0.0, 0.1, 0.0, 1e-5),
    kv_pool_tokens=4096,
    max_running_requests=8,
    swap_token_s=5e-5,
)
LONGEST_STEP_S = 0.3
NUM_REQUESTS = 6
# Of a comparison, and before it to warm a server up.
NUM_SERVED = NUM_REQUESTS + 8


def settings(folder: Path, model: Path, engine: Engine, policies: Sequence[str]) -> Settings:
    device = Device("test", 2.0, engine)
    return Settings(
        workload=chats.generated(600),
        servers=PolicyServers(
            model=model,
            folder=folder,
            flags=CPU_ENGINE_FLAGS,
            env=CPU_ENV,
            sage=SageConfig(),
            device=device,
        ),
        policies=tuple(policies),
        rates=("10",),
        num_seeds=2,
        num_requests=NUM_REQUESTS,
        max_new_tokens=8,
    )


def test_steps_and_moves_take_the_modelled_time(tmp_path: Path, model: Path) -> None:
    asked = settings(tmp_path, model, SLOW, ["fcfs", "sage"])
    runs = list(compare_policies(asked))
    assert [(run["policy"], run["seed"]) for run in runs] == [
        ("fcfs", 0), ("fcfs", 1), ("sage", 0), ("sage", 1),
    ]  # fmt: skip
    for run in runs:
        columns = run["requests"]
        # Whatever the host does meanwhile, nobody is sooner than the device alone would be.
        for i, ttlt_ms in enumerate(columns["e2e_latency_ms"]):
            fastest_s = alone_s(SLOW, columns["input_tokens"][i], columns["output_tokens"][i])
            assert ttlt_ms / 1e3 >= fastest_s - 1e-3
        steps = run["device"]["num_steps"]
        # The last step is launched before it is known that the one before was the last.
        assert 0.1 * steps <= run["device"]["device_s"] <= run["duration"] + LONGEST_STEP_S
        assert run["settings"]["device clock"] == "test"
    # What a move takes is the device's too, in the server's own time.
    sage = [run["counters"] for run in runs if run["policy"] == "sage"]
    seen_us = 1e6 * SLOW.swap_token_s
    assert sage[0]["preemption"]["swap_token_us"] == pytest.approx(seen_us / 2)
    # One server a policy, whose history begins anew with each run.
    assert len(list((tmp_path / "logs").iterdir())) == 2
    num_warmed = len(asked.workload.observations())
    for counters in sage:
        assert num_warmed <= counters["predictor"]["num_records"] <= num_warmed + NUM_SERVED
    assert sum(sage[1]["num_ranked"].values()) == NUM_REQUESTS


def test_a_server_learns_its_devices_times(tmp_path: Path, model: Path) -> None:
    """From proportions that are quite others. What is learned are the device's own seconds, however
    late the host is."""
    truth = StepTime(0.005, 0.002, 1e-4, 1e-7, 0.004, 1e-3, 4e-6)
    servers = settings(tmp_path, model, replace(SLOW, step_time=truth), ["sage"]).servers
    device = replace(servers.device, speed=1.0)  # type: ignore[type-var]
    learning = replace(servers, device=device)
    prompts = [f"Item {i}. " * (1 + i % 50) for i in range(90)]
    with learning.server("sage", "learning") as server:
        before = scheduler_state(server)["step_time"]
        for num_clients, share in ((1, prompts[:10]), (3, prompts[10:40]), (8, prompts[40:])):
            lengths = [10 + i % 50 for i in range(len(share))]
            with ThreadPoolExecutor(num_clients) as clients:
                list(clients.map(partial(_answer, server), share, lengths))
        after = scheduler_state(server)["step_time"]
    assert (before["source"], after["source"]) == ("shipped", "learned")
    latest = StepTimeConfig(**after["latest"]).step_time()
    for num_requests, kv_tokens in ((1, 150), (8, 1200)):
        decode_s = truth.decode_s(num_requests, kv_tokens)
        assert latest.decode_s(num_requests, kv_tokens) == pytest.approx(decode_s, rel=0.05)
    prefill_s = truth.prefill_s(1, 150, 150**2 / 2)
    assert latest.prefill_s(1, 150, 150**2 / 2) == pytest.approx(prefill_s, rel=0.05)
    assert after["error"] < 0.25  # of the latest steps, before they were learned from


def _answer(server: Server, prompt: str, num_tokens: int) -> None:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"text": prompt, "sampling_params": sampling}
    requests.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status()


def test_a_host_that_is_too_slow_is_refused(tmp_path: Path, model: Path) -> None:
    """Steps of a microsecond: no host computes them in time."""
    absurd = replace(SLOW, step_time=StepTime(1e-6, 0.0, 0.0, 0.0, 1e-6, 0.0, 0.0))
    asked = settings(tmp_path, model, absurd, ["fcfs"])
    said = r"held the device up .* overloaded"
    (run,) = compare_policies(replace(asked, num_seeds=1))
    assert not run["valid"]
    assert re.search(said, run["invalid_reason"])
    # Nor can it tell what the first policy sustains.
    with pytest.raises(ServerError, match=said):
        list(compare_policies(replace(asked, rates=("2x",))))
