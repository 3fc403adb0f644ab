"""Compares the simulator with a real engine: `python -m tests.checks.validate`.

It simulates the runs of a comparison, which it makes first unless its records are given, and prints
the error of the simulated TTLT. Exit code 1 if a run was invalid, 2 if nothing can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from bench.engines.clock.device import device_note
from bench.engines.server.server import ServerError
from bench.experiment import compare, records
from bench.experiment.records import Record
from bench.experiment.table import aligned
from bench.policies.rival import Rival
from bench.simulator.presets import PRESETS
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.workloads.predictors import Predict, Predictors
from bench.workloads.prompt_source import default_workload, load_workload
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, sample
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names
from sage_sched.fields import ConfigError

POLICIES = (
    "fcfs", "fcfs@conservativeness=0.3", "fcfs@conservativeness=0.1", "hrrn",
    "shortest-prefill-first", "uniboost", "ssjf", "trail-prompt", "sage",
)  # fmt: skip


class Point(NamedTuple):
    """TTLT of one run, on the engine and in the simulator: mean and 99th percentile, seconds."""

    rate: str
    policy: str
    measured_s: tuple[float, float]
    simulated_s: tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="?", help="records of a comparison")
    compare.configure(parser)
    parser.set_defaults(
        policies=POLICIES, rates=("1x", "1.5x", "2x"), seeds=3, num_requests=200,
        device_clock="h800-qwen3-32b", speed=4.0, output=Path("results/validate"),
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        if args.runs is None:
            made = compare.compare(args, compare.experiment_of(args), {})
        else:
            made = records.read(args.runs)
        runs = [record for record in made if not record.problem]
        if not runs:
            raise ValueError(f"{args.runs or args.output} has no valid run")
        workload = default_workload(args.data, args.workload)
        points = [*simulated(runs, load_workload(args.data, workload))]
    except (ConfigError, ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"tests.checks.validate: {error}", file=sys.stderr)
        return 2
    print(f"{device_note(runs[0].about['settings'])}\nTTLT, means over seeds\n{table(points)}")
    return int(len(runs) < len(made))


def simulated(runs: Sequence[Record], workload: Workload) -> Iterator[Point]:
    """Simulate each run's requests, arrivals and lengths with the settings of the run.

    Raises ValueError if the runs are of another workload, or had no device clock.
    """
    by_run = [
        sample(workload.evaluation, len(run.about["requests"]["class"]), run.seed) for run in runs
    ]
    predictors, config = Predictors(workload, len), _settings(runs[0]).predictor
    predictors.read([request for chosen in by_run for request in chosen], config.encoder)
    predict = predictors.semantic(config)
    for run, chosen in zip(tqdm(runs, desc="simulating"), by_run, strict=True):
        is_ours = Rival.parse(run.policy).policy in policy_names()
        yield _simulated(run, chosen, predict if is_ours else None)


def _simulated(run: Record, chosen: Sequence[WorkloadRequest], predict: Predict | None) -> Point:
    config, columns, settings = _settings(run), run.about["requests"], run.about["settings"]
    if columns["class"] != [request.class_name for request in chosen]:
        raise ValueError("the runs are of another workload: give --data as the comparison had")
    if not settings.get("device clock"):
        raise ValueError("the runs had no device clock")
    requests = [
        SimRequest(
            arrival_s=columns["sent_ms"][i] / 1e3,
            input_tokens=columns["input_tokens"][i],
            output_tokens=columns["output_tokens"][i],
            max_new_tokens=settings["max_new_tokens"],
            distribution=None if predict is None else predict(request),
            class_name=request.class_name,
        )
        for i, request in enumerate(chosen)
    ]
    # The median delay of a prediction, in real time; 0 under a stock policy.
    predictor = run.about["counters"].get("predictor", {})
    delay_s = predictor.get("prediction_latency_p50_ms", 0.0) / 1e3 * settings.get("speed", 1.0)
    metrics = simulate(
        PRESETS[settings["device clock"]],
        run.policy,
        config,
        sorted(requests, key=lambda request: request.arrival_s),
        Options(preempt=config.preemption.enabled, prediction_delay_s=delay_s),
    ).metrics()
    measured_s, simulated_s = (
        (found["mean_e2e_latency_ms"] / 1e3, found["p99_e2e_latency_ms"] / 1e3)
        for found in (run.metrics, metrics)
    )
    return Point(run.load, run.policy, measured_s, simulated_s)


def _settings(run: Record) -> SageConfig:
    return SageConfig.parse(run.about["settings"]["sage"])


def table(points: Sequence[Point]) -> str:
    """Return a table of means over seeds, by rate and policy."""
    body = []
    for rate, policy in dict.fromkeys(point[:2] for point in points):
        mine = [point[2:] for point in points if point[:2] == (rate, policy)]
        (mean, p99), (sim_mean, sim_p99) = np.mean(mine, axis=0)
        cells = (mean, sim_mean, sim_mean / mean, p99, sim_p99, sim_p99 / p99)
        body.append([rate, policy, *(f"{cell:.2f}" for cell in cells)])
    head = ("rate", "policy", "mean s", "simulated", "ratio", "p99 s", "simulated", "ratio")
    return aligned(head, body)


if __name__ == "__main__":
    sys.exit(main())
