"""Compares the simulator with a real engine: `python -m tests.checks.validate`.

It simulates the runs of a comparison, which it makes first unless its records are given, and prints
the error of the simulated TTLT. Exit code 1 if a run was invalid, 2 if nothing can be compared.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from bench.engines.clock.device import device_note
from bench.engines.server.server import ServerError
from bench.experiment import compare, records
from bench.experiment.records import Record
from bench.experiment.table import aligned
from bench.policies.rival import Rival
from bench.simulator.presets import PRESETS, Engine
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.whatif.command import read_step_time
from bench.workloads.predictors import Predict, Predictors
from bench.workloads.prompt_source import load_workload
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, sample
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names
from sage_sched.fields import ConfigError
from sage_sched.steps import StepTime

POLICIES = (
    "fcfs", "fcfs@conservativeness=0.3", "fcfs@conservativeness=0.1", "hrrn",
    "shortest-prefill-first", "uniboost", "ssjf", "trail-prompt", "sage",
)  # fmt: skip
# SGLang's choice on a host without a GPU (its start-up log).
_CPU_CHUNKED_PREFILL_SIZE = 4096


class Point(NamedTuple):
    """TTLT of one run, on the engine and in the simulator: mean and 99th percentile, seconds."""

    rate: str
    policy: str
    measured_s: tuple[float, float]
    simulated_s: tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="?", help="records of a comparison")
    parser.add_argument(
        "--step-time", metavar="FILE",
        help="what sage-sched bench fit has written, for runs that had no device clock",
    )  # fmt: skip
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
        step_time = read_step_time(args.step_time) if args.step_time else None
        points = [*simulated(runs, load_workload(args.data, args.workload), step_time)]
    except (ConfigError, ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"tests.checks.validate: {error}", file=sys.stderr)
        return 2
    print(f"{device_note(runs[0].about['settings'])}\nTTLT, means over seeds\n{table(points)}")
    return int(len(runs) < len(made))


def simulated(
    runs: Sequence[Record], workload: Workload, step_time: StepTime | None
) -> Iterator[Point]:
    """Simulate each run's requests, arrivals and lengths with the settings of the run.

    Raises ValueError if the runs are of another workload, or need a step_time.
    """
    by_run = [
        sample(workload.evaluation, len(run.about["requests"]["class"]), run.seed) for run in runs
    ]
    predictors, config = Predictors(workload, len), _settings(runs[0]).predictor
    predictors.read([request for chosen in by_run for request in chosen], config.encoder)
    predict = predictors.semantic(config)
    for run, chosen in zip(tqdm(runs, desc="simulating"), by_run, strict=True):
        is_ours = Rival.parse(run.policy).policy in policy_names()
        yield _simulated(run, chosen, predict if is_ours else None, step_time)


def _simulated(
    run: Record,
    chosen: Sequence[WorkloadRequest],
    predict: Predict | None,
    step_time: StepTime | None,
) -> Point:
    config, columns, settings = _settings(run), run.about["requests"], run.about["settings"]
    if columns["class"] != [request.class_name for request in chosen]:
        raise ValueError("the runs are of another workload: give --data as the comparison had")
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
        engine_of(settings, step_time),
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


def engine_of(settings: dict[str, Any], step_time: StepTime | None) -> Engine:
    """Return the engine of a run: its device clock's, or the one that its server flags describe."""
    if preset := settings.get("device clock"):
        return PRESETS[preset]
    if step_time is None:
        raise ValueError("the runs had no device clock: say with --step-time how long steps took")
    values = dict(pairwise(shlex.split(settings["server flags"])))
    env = settings["server environment"]
    return Engine(
        step_time=step_time,
        kv_pool_tokens=int(values["--max-total-tokens"]),
        max_running_requests=int(values["--max-running-requests"]),
        page_size=int(values.get("--page-size", 1)),
        chunked_prefill_size=int(values.get("--chunked-prefill-size", _CPU_CHUNKED_PREFILL_SIZE)),
        schedule_conservativeness=float(values.get("--schedule-conservativeness", 1.0)),
        clip_max_new_tokens=int(env.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", 4096)),
    )


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
