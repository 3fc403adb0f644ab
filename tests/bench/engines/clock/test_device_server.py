"""Comparisons on the device clock, small, on real servers."""

from __future__ import annotations

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
from bench.engines.server.server import Server
from bench.experiment.records import Record
from bench.experiment.run import run
from bench.experiment.spec import Experiment, Load, Options
from bench.policies.arm import Arm
from bench.simulator.presets import PRESETS
from bench.simulator.result import alone_s
from bench.workloads import chats
from sage_sched.app.config import SageConfig, StepTimeConfig
from sage_sched.steps import StepTime

pytestmark = pytest.mark.server

# Steps that any host computes in time.
SLOW = {
    "step_time": StepTime(0.2, 0.0, 1e-4, 0.0, 0.1, 0.0, 1e-5),
    "kv_pool_tokens": 4096,
    "max_running_requests": 8,
    "swap_token_s": 5e-5,
}
LONGEST_STEP_S = 0.3
PRESET = "h800-qwen3-32b"
NUM_REQUESTS = 6
# Of a comparison, and before it to warm a server up.
NUM_SERVED = NUM_REQUESTS + 8


def compared(folder: Path, model: Path, *policies: str, seeds: int) -> list[Record]:
    load = Load(
        name="ten", rate="10", num_requests=NUM_REQUESTS, max_new_tokens=8, arrivals="pulse",
        workload={"name": "chats"}, engine=SLOW,
    )  # fmt: skip
    experiment = Experiment(
        name="on clock", title="", arms=[Arm(policy=policy) for policy in policies], loads=[load],
        seeds=seeds, engine="clock", speed=2.0,
    )  # fmt: skip
    return run(experiment, Options(output=folder, model=model), lambda _: None)


def test_steps_and_moves_take_the_modelled_time(tmp_path: Path, model: Path) -> None:
    runs = compared(tmp_path, model, "fcfs", "sage", seeds=2)
    wanted = [(policy, seed) for policy in ("fcfs", "sage") for seed in (0, 1)]
    assert [(each.policy, each.seed) for each in runs] == wanted
    engine = replace(PRESETS[PRESET], **SLOW)
    for each in runs:
        about, columns = each.about, each.about["requests"]
        # No request is sooner than on the device alone, even if the host is quick.
        for i, ttlt_ms in enumerate(columns["e2e_latency_ms"]):
            fastest_s = alone_s(engine, columns["input_tokens"][i], columns["output_tokens"][i])
            assert ttlt_ms / 1e3 >= fastest_s - 1e-3
        steps, device_s = about["device"]["num_steps"], about["device"]["device_s"]
        # The last step is launched before it is known that the one before was the last.
        assert 0.1 * steps <= device_s <= each.metrics["duration"] + LONGEST_STEP_S
        assert about["settings"]["device clock"] == PRESET
    # A move takes the device's time too, in the server's own time.
    sage = [each.about["counters"] for each in runs if each.policy == "sage"]
    seen_us = 1e6 * engine.swap_token_s
    assert sage[0]["preemption"]["swap_token_us"] == pytest.approx(seen_us / 2)
    # One server a policy, whose history begins anew with each run.
    assert len(list((tmp_path / "on clock" / "logs").iterdir())) == 2
    num_warmed = len(chats.answered().observations())
    for counters in sage:
        assert num_warmed <= counters["predictor"]["num_records"] <= num_warmed + NUM_SERVED
    assert sum(sage[1]["num_ranked"].values()) == NUM_REQUESTS


def test_a_server_learns_its_devices_times(tmp_path: Path, model: Path) -> None:
    """It starts from other proportions, and learns the device's own seconds, however late the
    host is."""
    truth = StepTime(0.005, 0.002, 1e-4, 1e-7, 0.004, 1e-3, 4e-6)
    engine = replace(PRESETS[PRESET], **{**SLOW, "step_time": truth})
    learning = PolicyServers(
        model=model, folder=tmp_path, flags=CPU_ENGINE_FLAGS, env=CPU_ENV, sage=SageConfig(),
        device=Device("test", 1.0, engine),
    )  # fmt: skip
    learning.warm(chats.answered().observations())
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
