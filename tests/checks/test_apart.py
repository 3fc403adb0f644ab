"""Arms of an experiment on pairs of servers: what each is told, what is kept, and one pair."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.engines.server.side_by_side import Settings
from bench.experiment import records
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Experiment, Load
from bench.policies.arm import Arm
from bench.simulator.presets import PRESETS
from bench.simulator.result import alone_s
from sage_sched.steps import StepTime
from tests.bench.experiment.runs import run
from tests.bench.recordings import azure_like
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
    return Experiment(name="apart", title="", arms=arms, loads=loads, seeds=1, first_seed=7)


def asked(**changes: Any) -> argparse.Namespace:
    """The options of a command."""
    given = {"record": False, "speed": 2.0, "first_seed": None, "num_requests": 6}
    return argparse.Namespace(**{**given, **changes})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_arms_differ_in_what_they_keep_free_and_in_nothing_that_is_asked() -> None:
    experiment = experiment_of(_KEEPS_8, Arm(policy="sage"))
    loaded = Loaded(experiment.loads[0], None)
    told = [apart._settings(experiment, loaded, arm, asked(), Path()) for arm in experiment.arms]
    assert [each.servers.flags[-2:] for each in told] == [
        ("--num-reserved-decode-tokens", "8"), ("--num-reserved-decode-tokens", "512"),
    ]  # fmt: skip
    assert [each.policies for each in told] == [("fcfs",), ("sage",)]
    for each in told:
        assert (each.rates, each.num_requests, each.first_seed) == (("10.000",), 6, 7)
        assert (each.load, each.max_new_tokens) == ("sustained", 4096)


def test_no_prompt_comes_twice() -> None:
    experiment = experiment_of(_KEEPS_8, num_requests=100_000)
    loaded = Loaded(experiment.loads[0], None)
    told = apart._settings(experiment, loaded, _KEEPS_8, asked(num_requests=None), Path())
    workload = told.workload
    assert told.num_requests == len({r.prompt for r in workload.drawn(100_000, 7, again=False)})


def test_the_kv_of_a_token_takes_its_time_at_the_servers_speed(tmp_path: Path) -> None:
    experiment = experiment_of(Arm(policy="sage"))
    loaded = Loaded(experiment.loads[0], None)
    told = apart._settings(experiment, loaded, experiment.arms[0], asked(), tmp_path)
    pair: Any = told.servers.server("sage", "any")
    for server, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        token_s = float(server._env["SAGE_TEST_KV_TOKEN_S"])
        assert token_s == pytest.approx(PRESETS[_PRESET].swap_token_s / 2)
        command = server._command
        assert command[command.index("--disaggregation-mode") + 1] == mode
        assert server.log.stem == f"any-{mode}"


def test_a_run_that_does_not_count_is_not_kept_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(settings: Settings) -> Iterator[dict[str, Any]]:
        (policy,) = settings.policies
        yield {**run(policy, 7), "valid": policy == "fcfs", "device": None}

    monkeypatch.setattr(apart, "compare_policies", made_up)
    experiment = experiment_of(_KEEPS_8, Arm(policy="sage"))
    assert apart.measure(experiment, Loaded(experiment.loads[0], None), asked()) == 1
    (kept,) = records.read(Path("results/apart/apart.jsonl"))
    assert kept.key == ("apart", "ten", "fcfs, 8 kept free", 7, "clock")
    assert kept.made_by.command.startswith("python -m tests.checks.apart")


def test_requests_of_lengths_alone_are_asked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = experiment_of(Arm(policy="proserve"), workload={"name": "azure"}, rate="2")
    loaded = Loaded(experiment.loads[0], azure_like(tmp_path))

    def made_up(self: Any, arm: Arm, requests: Any, seed: int) -> Any:
        assert len(requests) == 6
        return served(loaded.load, arm, requests)

    monkeypatch.setattr(apart._PairsOfLengths, "__call__", made_up)
    assert apart.measure(experiment, loaded, asked()) == 0
    (kept,) = records.read(Path("results/apart/apart.jsonl"))
    assert kept.key == ("apart", "ten", "proserve", 7, "clock")


@pytest.mark.long
def test_a_pair_takes_the_time_of_its_steps_and_of_its_kv() -> None:
    experiment = experiment_of(Arm(policy="sage", engine=_SLOW), max_new_tokens=8)
    loaded = Loaded(experiment.loads[0], None)
    assert apart.measure(experiment, loaded, asked()) == 0
    (kept,) = records.read(Path("results/apart/apart.jsonl"))
    assert kept.key == ("apart", "ten", "sage", 7, "clock")
    (line,) = Path("results/apart/sage/runs.jsonl").read_text().splitlines()
    columns, engine = json.loads(line)["requests"], loaded.load.engine_of(experiment.arms[0])
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
