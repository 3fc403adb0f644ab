"""Arms of an experiment on pairs of servers: what each is told, what is kept, and one pair."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench.experiment import records
from bench.experiment.servers import Ran, Servers
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Experiment, Load, Options
from bench.policies.arm import Arm
from bench.simulator.presets import PRESETS
from bench.simulator.result import alone_s
from sage_sched.steps import StepTime
from tests.checks import apart

_PRESET = "h800-qwen3-32b"
# Steps that any host computes in time, and KV that takes longer than they do.
_SLOW = {
    "step_time": StepTime(0.2, 0.0, 1e-4, 0.0, 0.1, 0.0, 1e-5),
    "kv_pool_tokens": 4096,
    "max_running_requests": 8,
    "swap_token_s": 0.02,
}
_KEEPS_8 = Arm(policy="fcfs", label="fcfs, 8 kept free", engine={"reserved_decode_tokens": 8})


def experiment_of(*arms: Arm, **load: Any) -> Experiment:
    """Of generated prompts, ten a second."""
    given = {"workload": {"name": "mixed"}, "rate": "10", "apart": True, "preset": _PRESET}
    loads = [Load(name="ten", **{**given, **load})]
    return Experiment(
        name="apart", title="", arms=arms, loads=loads, seeds=1, first_seed=7, engine="clock",
        speed=2.0,
    )  # fmt: skip


def asked(**changes: Any) -> argparse.Namespace:
    """The options of a command."""
    return argparse.Namespace(**{"record": False, "data": None, **changes})


def servers_of(experiment: Experiment, arm: Arm) -> Any:
    loaded = Loaded(experiment.loads[0], None)
    return apart._PairServers(experiment, loaded, Options()).servers_of(arm)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_arms_differ_in_what_they_keep_free() -> None:
    experiment = experiment_of(_KEEPS_8, Arm(policy="fcfs"))
    assert [servers_of(experiment, arm).flags[-2:] for arm in experiment.arms] == [
        ("--num-reserved-decode-tokens", "8"), ("--num-reserved-decode-tokens", "512"),
    ]  # fmt: skip


def test_the_kv_of_a_token_takes_its_time_at_the_servers_speed() -> None:
    experiment = experiment_of(Arm(policy="fcfs"))
    pair: Any = servers_of(experiment, experiment.arms[0]).server("fcfs", "any")
    for server, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        token_s = float(server._env["SAGE_TEST_KV_TOKEN_S"])
        assert token_s == pytest.approx(PRESETS[_PRESET].swap_token_s / 2)
        command = server._command
        assert command[command.index("--disaggregation-mode") + 1] == mode
        assert server.log.stem == f"any-{mode}"


def test_a_run_that_does_not_count_is_not_kept_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Servers, arm: Arm, seed: int) -> Ran:
        if arm.policy != "fcfs":
            return Ran(None, "late")
        return Ran(served(self._load, arm, self._loaded.requests(arm, seed)), "", {"counters": {}})

    monkeypatch.setattr(Servers, "run", run)
    experiment = experiment_of(_KEEPS_8, Arm(policy="sage"), num_requests=6)
    assert apart.measure(experiment, asked()) == 1
    (kept,) = records.read(Path("results/apart/apart.jsonl"))
    assert kept.key == ("apart", "ten", "fcfs, 8 kept free", 7, "clock")
    assert kept.made_by.command.startswith("python -m tests.checks.apart")


@pytest.mark.long
def test_a_pair_takes_the_time_of_its_steps_and_of_its_kv() -> None:
    arm = Arm(policy="sage", engine=_SLOW)
    experiment = experiment_of(arm, max_new_tokens=8, num_requests=6)
    assert apart.measure(experiment, asked()) == 0
    (kept,) = records.read(Path("results/apart/apart.jsonl"))
    assert kept.key == ("apart", "ten", "sage", 7, "clock")
    columns, engine = kept.about["requests"], experiment.loads[0].engine_of(arm)
    tokens = columns["input_tokens"]
    for i, ttlt_ms in enumerate(columns["e2e_latency_ms"]):
        least_s = alone_s(engine, tokens[i], columns["output_tokens"][i])
        assert ttlt_ms / 1e3 >= least_s + tokens[i] * engine.swap_token_s - 1e-3
    # One after the other.
    came_ms = [
        sent + ttft for sent, ttft in zip(columns["sent_ms"], columns["ttft_ms"], strict=True)
    ]
    assert max(came_ms) / 1e3 >= sum(tokens) * engine.swap_token_s
    assert kept.metrics["mean_ttft_ms"] == pytest.approx(sum(columns["ttft_ms"]) / 6, abs=1)
