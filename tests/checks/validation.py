"""Simulates the runs of a comparison, and measures the simulator's error."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.experiment.records import Record
from bench.experiment.stats import ordered
from bench.experiment.table import aligned
from bench.policies.rival import Rival
from bench.simulator.presets import PRESETS, Engine
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.workloads.predictors import Predict, Predictors
from bench.workloads.prompts import Workload, WorkloadRequest, sample
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names
from sage_sched.steps import StepTime

# Policies whose means are closer than this may change places.
ORDER_MARGIN = 0.05
# SGLang's choice on a host without a GPU (its start-up log).
_CPU_CHUNKED_PREFILL_SIZE = 4096
# policy -> rate -> {"mean_ratio", "p99_ratio"}, simulated to measured
Summary = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Point:
    """TTLT of one run, on the engine and in the simulator: mean and 99th percentile, seconds."""

    policy: str
    rate: str
    seed: int
    measured_s: tuple[float, float]
    simulated_s: tuple[float, float]


def simulate_runs(
    runs: Sequence[Record], workload: Workload, step_time: StepTime | None
) -> list[Point]:
    """Simulate each run's requests, arrivals and lengths with the settings of the run.

    Raises ValueError if the runs are of another workload, or need a step_time.

    step_time: the server's, if it had no device clock.
    """
    by_run = [
        sample(workload.evaluation, len(run.about["requests"]["class"]), run.seed) for run in runs
    ]
    predict = None
    if any(_is_ours(run) for run in runs):
        predictors, config = Predictors(workload, len), _settings(runs[0]).predictor
        predictors.read([request for chosen in by_run for request in chosen], config.encoder)
        predict = predictors.semantic(config)
    return [
        _simulated(run, chosen, predict if _is_ours(run) else None, step_time)
        for run, chosen in zip(tqdm(runs, desc="simulating"), by_run, strict=True)
    ]


def _is_ours(run: Record) -> bool:
    return Rival.parse(run.policy).policy in policy_names()


def _simulated(
    run: Record,
    chosen: Sequence[WorkloadRequest],
    predict: Predict | None,
    step_time: StepTime | None,
) -> Point:
    config, columns = _settings(run), run.about["requests"]
    if columns["class"] != [request.class_name for request in chosen]:
        raise ValueError("the runs are of another workload: give --data as the comparison had")
    requests = [
        SimRequest(
            arrival_s=columns["sent_ms"][i] / 1e3,
            input_tokens=columns["input_tokens"][i],
            output_tokens=columns["output_tokens"][i],
            max_new_tokens=run.about["settings"]["max_new_tokens"],
            distribution=None if predict is None else predict(request),
            class_name=request.class_name,
        )
        for i, request in enumerate(chosen)
    ]
    metrics = simulate(
        engine_of(run.about["settings"], step_time),
        run.policy,
        config,
        sorted(requests, key=lambda request: request.arrival_s),
        Options(preempt=config.preemption.enabled, prediction_delay_s=_prediction_delay_s(run)),
    ).metrics()
    measured_s, simulated_s = (
        (found["mean_e2e_latency_ms"] / 1e3, found["p99_e2e_latency_ms"] / 1e3)
        for found in (run.metrics, metrics)
    )
    return Point(run.policy, run.load, run.seed, measured_s, simulated_s)


def _settings(run: Record) -> SageConfig:
    return SageConfig.parse(run.about["settings"]["sage"])


def _prediction_delay_s(run: Record) -> float:
    """Return the median delay in real time; 0 under a stock policy."""
    predictor = run.about["counters"].get("predictor", {})
    delay_ms = float(predictor.get("prediction_latency_p50_ms", 0.0))
    return delay_ms / 1e3 * float(run.about["settings"].get("speed", 1.0))


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


def summarize(points: Sequence[Point]) -> Summary:
    """Return the ratios of means over seeds."""
    summary: Summary = {}
    for policy in ordered(point.policy for point in points):
        for rate in ordered(point.rate for point in points if point.policy == policy):
            measured_s, simulated_s = means_s(points, policy, rate)
            mean, p99 = (float(ratio) for ratio in simulated_s / measured_s)
            summary.setdefault(policy, {})[rate] = {"mean_ratio": mean, "p99_ratio": p99}
    return summary


def means_s(points: Sequence[Point], policy: str, rate: str) -> Any:
    """Return means over seeds: measured and simulated, each with the mean and p99."""
    mine = [p for p in points if (p.policy, p.rate) == (policy, rate)]
    return np.mean([(p.measured_s, p.simulated_s) for p in mine], axis=0)


def misordered(points: Sequence[Point]) -> list[str]:
    """Return pairs of policies whose measured means differ by more than ORDER_MARGIN, and which the
    simulator orders the other way round."""
    found = []
    for rate in ordered(point.rate for point in points):
        policies = ordered(point.policy for point in points if point.rate == rate)
        means = {policy: means_s(points, policy, rate)[:, 0] for policy in policies}
        for one, other in combinations(policies, 2):
            measured, simulated = means[one] / means[other]
            apart = max(measured, 1 / measured) > 1 + ORDER_MARGIN
            if apart and (measured > 1) != (simulated > 1):
                found.append(
                    f"{rate}: {one} / {other} is {measured:.2f}, simulated {simulated:.2f}"
                )
    return found


def table(points: Sequence[Point]) -> str:
    """Return a table of means over seeds, by rate and policy."""
    body = []
    for rate in ordered(point.rate for point in points):
        for policy in ordered(point.policy for point in points if point.rate == rate):
            (mean, p99), (sim_mean, sim_p99) = means_s(points, policy, rate)
            cells = (mean, sim_mean, sim_mean / mean, p99, sim_p99, sim_p99 / p99)
            body.append([rate, policy, *(f"{cell:.2f}" for cell in cells)])
    head = ("rate", "policy", "mean s", "simulated", "ratio", "p99 s", "simulated", "ratio")
    return aligned(head, body)
