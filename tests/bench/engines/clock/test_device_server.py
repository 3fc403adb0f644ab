"""Comparisons on the device clock, small, on real servers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engines.clock import device
from bench.engines.server import kept_server
from bench.experiment.run import run
from bench.experiment.spec import Experiment, Load, Options
from bench.policies.arm import Arm
from bench.simulator.host import NO_HOST
from bench.simulator.presets import PRESETS
from bench.simulator.result import alone_s
from bench.workloads import chats
from sage_sched.steps import StepTime

pytestmark = pytest.mark.server

# Steps that any host computes in time.
SLOW = {
    "step_time": StepTime(0.2, 0.0, 1e-4, 0.0, 0.1, 0.0, 1e-5),
    "kv_pool_tokens": 4096,
    "max_running_requests": 8,
    "swap_token_s": 5e-5,
    "host": NO_HOST,
}
LONGEST_STEP_S = 0.3
PRESET = "h800-qwen3-32b"
NUM_REQUESTS = 6
# The requests of a comparison, and of the warm-up before it.
NUM_SERVED = NUM_REQUESTS + 8


def test_steps_and_moves_take_the_modelled_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    for module in (device, kept_server):  # a busy host may delay the device here
        monkeypatch.setattr(module, "MAX_LATE_SHARE", math.inf)
    load = Load(
        name="ten", rate="10", num_requests=NUM_REQUESTS, max_new_tokens=8, arrivals="pulse",
        workload={"name": "chats"}, engine=SLOW,
    )  # fmt: skip
    experiment = Experiment(
        name="on clock", title="", arms=[Arm(policy="fcfs"), Arm(policy="sage")], loads=[load],
        seeds=2, engine="clock", speed=2.0,
    )  # fmt: skip
    runs = run(experiment, Options(output=tmp_path, model=model), lambda _: None)
    wanted = [(policy, seed) for policy in ("fcfs", "sage") for seed in (0, 1)]
    assert [(each.policy, each.seed) for each in runs] == wanted
    assert [each.problem for each in runs] == [""] * 4
    engine = replace(PRESETS[PRESET], **SLOW)
    for each in runs:
        about, columns = each.about, each.about["requests"]
        # No request takes less time than alone on the device, even if the host is fast.
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
    # One server per policy. Its history begins anew with each run.
    assert len(list((tmp_path / "on clock" / "logs").iterdir())) == 2
    num_warmed = len(chats.answered().observations())
    for counters in sage:
        assert num_warmed <= counters["predictor"]["num_records"] <= num_warmed + NUM_SERVED
    assert sum(sage[1]["num_predicted"].values()) == NUM_REQUESTS
