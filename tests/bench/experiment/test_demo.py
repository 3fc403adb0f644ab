"""The demo ends with a report on hosts of any speed, and says which runs it made."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engines.baseline import Saturation
from bench.engines.clock import host
from bench.engines.clock.host import SPEEDS, speed_for, step_times_s
from bench.experiment import demo, servers
from bench.experiment.pace import Pace
from bench.experiment.records import Record
from bench.experiment.servers import Ran
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Experiment
from bench.policies.arm import Arm
from tests.bench.experiment.runs import record

ARMS = [Arm(policy="fcfs"), Arm(policy="sage")]
RUN_S = 150.0


class Host:
    """A host on which a server starts in start_s, and whose clock is late above a speed."""

    def __init__(self, start_s: float, most: float) -> None:
        self.now_s, self.ran = 0.0, list[tuple[float, str, int]]()
        self.said = list[str]()
        self._start_s, self._most = start_s, most
        self._up: object = None

    def serve(self, speed: float, arm: Arm, seed: int) -> Record:
        self.ran.append((speed, arm.name, seed))
        self.now_s += RUN_S / speed + (self._start_s if self._up != (speed, arm) else 0.0)
        self._up = speed, arm
        is_late = speed > self._most
        found = replace(record(arm.name, seed), about={"device": {"late_s": 0.0}})
        return replace(found, problem="late") if is_late else found

    def compare(self, speed: float, budget_s: float) -> list[tuple[str, int]]:
        pace = Pace(self.serve, speed, RUN_S, budget_s, self.said.append, lambda: self.now_s)
        pace.compare(ARMS, range(3))
        return [(found.arm, found.seed) for found in pace.found(ARMS)]


@pytest.mark.parametrize(
    ("start_s", "most", "first", "num_pairs", "ran_at"),
    [
        (20.0, 6.0, 6.0, 3, "6 6 6 6 6 6"),  # an idle host
        (40.0, 3.0, 6.0, 3, "6 3 3 3 3 3 3"),  # slower than measured: the first run is invalid
        (60.0, 1.6, 3.0, 1, "3 1.5 1.5"),  # a slow one: fewer seeds
        (90.0, 1.0, 1.0, 1, "1 1"),
        (60.0, 0.1, 1.0, 0, "1"),  # half the speed would take too long
        (60.0, 0.5, 0.5, 0, ""),
    ],
)
def test_seeds_and_speed_fit_the_time(
    start_s: float, most: float, first: float, num_pairs: int, ran_at: str
) -> None:
    on = Host(start_s, most)
    found = on.compare(first, 540.0)
    assert found == [(arm, seed) for arm in ("fcfs", "sage") for seed in range(num_pairs)]
    assert " ".join(f"{speed:g}" for speed, *_ in on.ran) == ran_at
    assert on.now_s <= 540.0
    num_late = sum(speed > most for speed, *_ in on.ran)
    assert sum("Half the speed" in said for said in on.said) == num_late


def test_a_run_is_announced_with_the_time_left() -> None:
    on = Host(20.0, 6.0)
    on.compare(6.0, 540.0)
    first, *_, last = on.said
    assert first.startswith("real servers: fcfs, run 1 of 3, 6 times as fast as reality; about 4 m")
    assert last.startswith("real servers: sage, run 3 of 3, 6 times as fast as reality; about 1 m")


def test_seeds_that_one_policy_alone_served_do_not_count() -> None:
    on = Host(20.0, 6.0)
    serve = on.serve

    def slower(speed: float, arm: Arm, seed: int) -> Record:
        on.now_s += 100.0 * (arm.name == "sage")
        return serve(speed, arm, seed)

    on.serve = slower  # type: ignore[method-assign]
    assert on.compare(6.0, 240.0) == [("fcfs", 0), ("sage", 0)]


def test_the_clock_is_as_fast_as_the_host_keeps_up_with() -> None:
    """One step in ten takes five times as long."""
    spread: Sequence[float] = (1, 1, 1, 1, 1, 1, 1, 1, 1, 5)
    times = ([step_s * each for each in spread] for step_s in (0.001, 0.002, 0.004, 0.1))
    speeds = [speed_for(steps_s, 0.040) for steps_s in times]
    assert speeds == [6.0, 4.0, 2.0, SPEEDS[-1]]
    now_s = iter(float(i) for i in range(1000))
    worked = list[int]()
    found = step_times_s(lambda: worked.append(1), lambda: next(now_s), lambda s: None)
    assert found == [1.0] * len(worked)
    assert len(worked) > 100


class Scripted(servers.Servers):
    """Servers whose runs the simulator serves, if the host is not late."""

    problem: Callable[[float], str] = staticmethod(lambda speed: "")

    def run(self, arm: Arm, seed: int) -> Ran:
        if problem := type(self).problem(self._speed):
            return Ran(None, problem, {"device": {"late_s": 9.0}} if problem == "late" else {})
        result = served(self._load, arm, self._loaded.requests(arm, seed))
        about = {"counters": {}, "device": None, "requests": servers.columns(result)}
        return Ran(result, "", about)


def _no_time(speed: float) -> str:
    time.sleep(60)
    return ""


@pytest.mark.parametrize(
    ("problem", "budget_s", "said"),
    [
        (lambda speed: "", 600.0, ""),
        (lambda speed: "late", 600.0, "this host is too slow for it to take less than ten minutes"),
        (lambda speed: "no memory", 600.0, "no memory"),
        (_no_time, 0.0, "it was not done in ten minutes"),
    ],
)  # fmt: skip
def test_a_demo_always_ends_with_a_report(
    problem: Callable[[float], str],
    budget_s: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = Experiment.read("demo")
    assert whole.tuned is not None
    tuned = replace(whole.tuned, policies=["fcfs"], clips=[32], seeds=[11])
    less = replace(whole, tuned=tuned, loads=[replace(whole.loads[0], num_requests=40)])
    monkeypatch.setattr(Experiment, "read", lambda name: less)
    monkeypatch.setattr(Loaded, "saturated", Saturation(1.7, 99.0))
    monkeypatch.setattr(servers, "Servers", Scripted)
    monkeypatch.setattr(Scripted, "problem", staticmethod(problem))
    monkeypatch.setattr(demo, "BUDGET_S", budget_s)
    monkeypatch.setattr(host, "step_times_s", lambda: [0.001])
    assert demo.run(argparse.Namespace(simulate=False, seeds=1, output=tmp_path)) == 0
    out = capsys.readouterr().out
    assert out.index("Simulated: sage finished") < out.index("measuring the host")
    last = out.splitlines()[-1]
    assert last == f"report: {tmp_path / 'demo' / 'report.html'}"
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert ("There is no comparison on real servers" in page) == bool(said)
    assert said in page
    assert ("<td>device clock</td>" in page) == (not said)
    assert "Real servers come next" not in page
