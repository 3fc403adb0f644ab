"""The check of what is said against what happened, on runs that are made up of simulated ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engines.simulator.presets import PRESETS
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.whatif import check
from bench.workloads.arrivals import poisson_arrivals
from bench.workloads.named import load_workload
from bench.workloads.prompts import sample
from sage_sched.config import SageConfig, StepTimeConfig, in_ms

PRESET, POLICIES = "h800-80gb-qwen3-32b", ("fcfs", "fcfs@clip=256")
NUM_REQUESTS = 80


def runs(factors: dict[str, float]) -> list[dict[str, Any]]:
    """What servers would have done that take so many times as long as the simulator says."""
    chosen = sample(load_workload(None).evaluation, NUM_REQUESTS, 0)
    requests = [
        SimRequest(float(at) / 3, 100, min(r.output_tokens, 2047), 2048, None, r.class_name)
        for at, r in zip(poisson_arrivals(NUM_REQUESTS, 0), chosen, strict=True)
    ]
    made = []
    for policy in POLICIES:
        ttlt_s = (
            factors.get(policy, 1.0)
            * simulate(PRESETS[PRESET], policy, SageConfig(), requests).ttlt_s
        )
        made.append(
            {
                "policy": policy, "rate": "2x", "seed": 0, "valid": True,
                "mean_e2e_latency_ms": 1e3 * float(ttlt_s.mean()),
                "counters": {}, "settings": {
                    "device clock": PRESET, "speed": 2.0, "max_new_tokens": 2048, "sage": {},
                },
                "requests": {
                    "class": [r.class_name for r in requests],
                    "sent_ms": [1e3 * r.arrival_s for r in requests],
                    "input_tokens": [r.input_tokens for r in requests],
                    "output_tokens": [r.output_tokens for r in requests],
                    "e2e_latency_ms": [1e3 * float(s) for s in ttlt_s],
                },
            }
        )  # fmt: skip
    return made


def checked(made: list[dict[str, Any]], folder: Path) -> int:
    (folder / "runs.jsonl").write_text("\n".join(json.dumps(run) for run in made))
    return check.main([str(folder / "runs.jsonl"), "--output", str(folder)])


def test_what_happened_as_simulated_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = runs({})
    told = StepTimeConfig(**in_ms(PRESETS[PRESET].step_time))
    faster = {n: getattr(told, n) / 2.0 for n in StepTimeConfig.__dataclass_fields__}
    made[1]["counters"] = {"step_time": {"source": "learned", **faster}}
    assert checked(made, tmp_path) == 0
    printed = capsys.readouterr().out
    assert printed.count("| 1.00 |") == 6
    assert "learned step times" in printed


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({"fcfs@clip=256": 1.2}, "fcfs@clip=256 is too far off"),
        ({"fcfs": 0.5}, "fcfs / fcfs@clip=256 is"),
    ],
)
def test_what_happened_otherwise_does_not(
    factors: dict[str, float], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(runs(factors), tmp_path) == 1
    assert said in capsys.readouterr().out


def test_runs_of_another_workload_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = runs({})
    for run in made:
        run["requests"] = {**run["requests"], "class": ["other"] * NUM_REQUESTS}
    assert checked(made, tmp_path) == 2
    assert "another workload" in capsys.readouterr().err


def test_a_case_knows_what_is_too_far() -> None:
    case = check.Case("2x", "with prompts", 0.1, {"a": (10.0, 10.9), "b": (8.0, 9.0)})
    assert (case.too_far(), case.misnamed()) == (["b"], [])
    other = replace(case, means_s={"a": (10.0, 10.0), "b": (9.9, 10.1)})
    assert other.misnamed() == []
