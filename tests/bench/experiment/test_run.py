"""The shipped experiments, run small in the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engines.baseline import Saturation
from bench.experiment.run import Options, best_tuned, changed, run
from bench.experiment.servers import Ran
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Experiment, Load
from bench.policies.arm import Arm
from bench.simulator.pool import OutOfMemoryError
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import Purpose
from sage_sched.cli import main
from sage_sched.fields import ConfigError
from tests.bench.recordings import agents_like, azure_like, triage_like
from tests.bench.workloads.fingerprint import fingerprint


def small(name: str, **load: object) -> Experiment:
    """Return an experiment of one load and few requests."""
    experiment = Experiment.read(name)
    first = replace(experiment.loads[0], num_requests=24, **load)  # type: ignore[arg-type]
    return replace(experiment, loads=[first], seeds=1)


def test_a_loads_rate_and_length_follow_from_the_capacity(tmp_path: Path) -> None:
    """Four engines sustain 8 requests/s. Ten service times of 3 s are 120 requests at half that
    rate."""
    load = Load(name="any", rate="0.5x", nodes=4)
    loaded = Loaded(load, azure_like(tmp_path), measure=lambda: Saturation(2.0, 3.0))
    assert (loaded.rate_per_s, len(loaded.arrivals_s(0))) == (4.0, 120)
    recorded = replace(loaded, load=replace(load, arrivals="recorded", num_requests=60))
    found = [fingerprint(of.arrivals_s(seed)) for of in (loaded, recorded) for seed in (0, 1)]
    assert found == ["756d2b73", "da0d303b", "b7143537", "652a2c51"]


def tuned(**fields: Any) -> Experiment:
    return Experiment.parse("tuned", {"title": "", "arms": ["sage"], "seeds": 1, **fields})


def test_a_setting_under_which_a_server_ends_is_not_the_best() -> None:
    workload = {
        "name": "two kinds", "short_share": 0.9, "short_tokens": [20, 800],
        "long_tokens": [8000, 9000], "sensitive": False,
    }  # fmt: skip
    engine = {"kv_pool_tokens": 40000, "chunked_prefill_size": 2048}
    experiment = tuned(
        tuned={"policies": ["shortest-prefill-first", "fcfs"], "clips": [16], "seeds": [5]},
        defaults={
            "workload": workload, "rate": 10, "num_requests": 150, "arrivals": "pulse",
            "max_new_tokens": 1024, "engine": engine,
        },
    )  # fmt: skip
    loaded = Loaded(experiment.loads[0], None)
    ends = Arm(policy="shortest-prefill-first@clip=16")
    with pytest.raises(OutOfMemoryError):
        served(loaded.load, ends, loaded.requests(ends, 5, Purpose.TUNING))
    assert best_tuned(experiment, loaded).policy == "fcfs@clip=16"


def test_an_experiment_is_changed_as_a_user_asks() -> None:
    """Nothing is tuned for other arms, unless the tuned arm gives a load's rate."""
    for capacity_by, is_tuned in (("fcfs", False), ("tuned", True)):
        experiment = tuned(
            tuned={"policies": ["fcfs"], "clips": [64]}, defaults={"capacity_by": capacity_by},
            loads={"one": {}, "two": {}},
        )  # fmt: skip
        assert changed(experiment) == experiment
        found = changed(experiment, engine="clock", seeds=7, loads=["two"], arms=["lpm", "sage"])
        assert found == replace(
            experiment, engine="clock", seeds=7, loads=experiment.loads[1:],
            arms=[Arm(policy="lpm"), Arm(policy="sage")],
            tuned=experiment.tuned if is_tuned else None,
        )  # fmt: skip


def test_each_seed_begins_with_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    served: Any = "served"

    class Asked:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, arm: Arm, seed: int) -> Ran:
            asked.append((arm.policy, seed))
            if seed == 5:
                return Ran(None, "late")
            return Ran(served, "", {"counters": {"decisions": {"num_yields": 3}}})

        def close(self) -> None:
            pass

    experiment = tuned(
        arms=["fcfs", "sage"],
        seeds=2,
        first_seed=4,
        engine="server",
        defaults={"workload": "chats", "rate": 1},
    )
    monkeypatch.setattr("bench.experiment.run.measured", lambda *_: {"duration": 2.0})
    found = run(experiment, Options(), lambda _: None, Asked)
    assert asked == [("fcfs", 4), ("sage", 4), ("sage", 5), ("fcfs", 5)]
    metrics = {"duration": 2.0, "num_yields": 3.0}
    assert [(each.metrics, each.problem) for each in found] == [(metrics, "")] * 2 + [
        ({}, "late")
    ] * 2


def test_many_engines_apart_have_dispatchers_and_first_tokens_are_counted(tmp_path: Path) -> None:
    of_four = small("apart-nodes", rate="0.5x", max_new_tokens=8)
    found = run(of_four, Options(data=azure_like(tmp_path)), lambda _: None)
    assert len(found) == len(of_four.arms)
    assert all(record.metrics["ttft_attainment"] > 0.5 for record in found)
    assert fingerprint([[*record.metrics.items()] for record in found]) == "466a8607"


@pytest.mark.parametrize(
    ("name", "load", "wanted"),
    [
        ("best-effort", {}, "0cd91791"), ("gaps", {}, "a20cd430"),
        ("slo", {"rate": "5"}, "e561bc95"), ("urgency", {"rate": "3"}, "0216c6c5"),
        ("agents", {"rate": "0.5", "workload": {"name": "agents", "max_steps": 2}}, "3d9b614b"),
        ("cluster", {"rate": "2", "workload": {"name": "agents", "max_steps": 2}}, "a073ac88"),
    ],
)  # fmt: skip
def test_experiments_run_small(
    name: str, load: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    experiment = small(name, **load)
    folder = agents_like(triage_like(azure_like(tmp_path)))
    found = run(experiment, Options(data=folder if load else None), lambda _: None)
    assert [record.arm for record in found] == [arm.name for arm in experiment.arms]
    columns = {*experiment.columns, *experiment.ratios}
    assert all(columns <= record.metrics.keys() for record in found)
    assert fingerprint([[*record.metrics.items()] for record in found]) == wanted


def test_papers_run_small_on_generated_prompts_only_if_asked() -> None:
    for name in ("paper", "trail", "sagesched"):
        experiment = changed(Experiment.read(name), generated=True, arms=["fcfs"])
        assert experiment.name == f"{name}-generated"  # its records replace none of real prompts
        assert experiment.seeds == 1
        assert {load.workload["name"] for load in experiment.loads} == {"chats"}
    at_once = changed(Experiment.read("trail"), generated=True, loads=["at once"], arms=["fcfs"])
    (record,) = run(at_once, Options(), lambda _: None)
    assert record.metrics["mean_waited_s"] > 10  # so an order matters
    with pytest.raises(ConfigError, match="azure needs --data"):
        changed(Experiment.read("slo"), generated=True)


def test_missing_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, file in (
        ("tail", "math_code_reasoning"), ("paper", "alpaca_eval"), ("trail", "alpaca_eval"),
        ("slo", "trace_azure2023_conv"),
    ):  # fmt: skip
        with pytest.raises(WorkloadError, match=rf"--data DIR names the folder with .*{file}"):
            run(small(name), Options(), lambda _: None)
    late = {"workload": {"name": "generated"}, "arrivals": "recorded"}
    with pytest.raises(WorkloadError, match="recorded arrivals needs"):
        run(small("gaps", **late), Options(), lambda _: None)
    with pytest.raises(WorkloadError, match="no requests of class talk, only of"):
        run(small("paper", workload={"name": "generated", "classes": ["talk"]}), Options(), print)
    azure_like(tmp_path)
    for workload, said in (({"name": "nothing"}, "no workload"), ({"name": "azure", "x": 1}, "x")):
        with pytest.raises(ConfigError, match=said):
            run(small("paper", workload=workload), Options(data=tmp_path), lambda _: None)
    with pytest.raises(ConfigError, match="loads are"):
        changed(Experiment.read("slo"), loads=["none"])
    assert main(["bench", "run", "agents", "--data", str(tmp_path)]) == 2
    assert "trace_agentic_coding" in capsys.readouterr().err


@pytest.mark.slow
def test_loads_of_a_mix_share_a_setting_and_a_capacity() -> None:
    experiment = tuned(
        arms=["fcfs", {"policy": "sage", "preempt": False}],
        columns=["good_per_s", "on_time_share"],
        tuned={"policies": ["fcfs"], "clips": [512, 64], "by": "good_share", "rates": ["1x"]},
        defaults={
            "workload": "generated", "arrivals": "pulse", "num_requests": 200,
            "capacity_by": "tuned", "measured": [0.2, 0.8], "max_new_tokens": 512,
            "engine": {"kv_pool_tokens": 8000},
        },
        loads={"chat": {"rates": ["0.5x", "2x"]}},
    )  # fmt: skip
    found = run(experiment, Options(), lambda _: None)
    names = ("offered_rate", "good_share", "good_per_s", "on_time_share", "num_yields")
    shown = [
        (each.load, each.policy, *(round(each.metrics[name], 3) for name in names))
        for each in found
    ]
    assert shown == [  # the first and the last requests do not count as good or bad
        ("chat, 0.5x", "fcfs@clip=64", 1.923, 1.0, 1.93, 1.0, 0.0),
        ("chat, 0.5x", "fcfs", 1.923, 1.0, 1.93, 1.0, 0.0),
        ("chat, 0.5x", "sage", 1.923, 1.0, 1.93, 1.0, 0.0),
        ("chat, 2x", "fcfs@clip=64", 7.693, 0.458, 3.538, 0.648, 0.0),
        ("chat, 2x", "fcfs", 7.693, 0.0, 0.0, 0.293, 0.0),
        ("chat, 2x", "sage", 7.693, 0.508, 3.923, 0.604, 0.0),
    ]
    again = run(experiment, Options(jobs=2), lambda _: None)
    assert sorted(r.line() for r in again) == sorted(r.line() for r in found)
