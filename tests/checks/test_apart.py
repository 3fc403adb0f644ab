"""A prefill server and a decode server on the device clock."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.experiment import records
from bench.experiment.spec import Experiment, Load
from bench.policies.arm import Arm
from bench.simulator.result import alone_s
from sage_sched.steps import StepTime
from tests.checks import apart

# Steps that any host computes in time, and KV that takes longer than they do.
_SLOW = {
    "step_time": StepTime(0.2, 0.0, 1e-4, 0.0, 0.1, 0.0, 1e-5),
    "kv_pool_tokens": 4096,
    "max_running_requests": 8,
    "swap_token_s": 0.02,
}


@pytest.mark.long
def test_a_pair_takes_steps_and_moves_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arm = Arm(policy="sage", engine=_SLOW)
    load = Load(
        name="ten", workload={"name": "mixed"}, rate="10", apart=True, preset="h800-qwen3-32b",
        max_new_tokens=8, num_requests=6,
    )  # fmt: skip
    experiment = Experiment(
        name="apart", title="", arms=(arm,), loads=[load], seeds=1, first_seed=7, engine="clock",
        speed=2.0,
    )  # fmt: skip
    assert apart.measure(experiment, argparse.Namespace(record=False, data=None)) == 0
    (kept,) = records.read(Path("results/apart/apart.jsonl"))
    assert kept.key == ("apart", "ten", "sage", 7, "clock")
    columns, engine = kept.about["requests"], load.engine_of(arm)
    tokens = columns["input_tokens"]
    for i, ttlt_ms in enumerate(columns["e2e_latency_ms"]):
        least_s = alone_s(engine, tokens[i], columns["output_tokens"][i])
        assert ttlt_ms / 1e3 >= least_s + tokens[i] * engine.swap_token_s - 1e-3
    # The KV of one prompt is sent after that of another.
    came_ms = [
        sent + ttft for sent, ttft in zip(columns["sent_ms"], columns["ttft_ms"], strict=True)
    ]
    assert max(came_ms) / 1e3 >= sum(tokens) * engine.swap_token_s
    assert kept.metrics["mean_ttft_ms"] == pytest.approx(sum(columns["ttft_ms"]) / 6, abs=1)
