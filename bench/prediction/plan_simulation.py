"""What hidden states are worth to schedules, in the plan language, simulated.

    python -m bench.prediction.plan_simulation --model results/plan --probe F --trail-probe F

Requests are answers that no probe was trained on, with what their probes say at each age, read from
the model beforehand: real scores, not modelled ones. The same requests go to each policy. Ratios
are of mean times to the last token, medians over seeds with bootstrapped 95 % intervals.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.engines.simulator.presets import PRESETS, Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Result
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.prediction.plan_quality import forecasts_of_prompts
from bench.prediction.plan_recording import CAP_TOKENS, plan_answers
from bench.prediction.plan_states import exact_reading, exact_scores, read_answers
from predictor_store.probe.probe_file import ProbeFile
from predictor_store.torchvision_schemas import define_missing
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution

POLICIES = ("fcfs", "trail-prompt", "trail", "sage", "sage+", "srpt-oracle")
# A policy by what the exact filter knows, in its probe's place.
_EXACT = "@exact"
_ARMS = ("fcfs", "trail-prompt", "trail", "sage", "sage+", "sage+@exact", "srpt-oracle")
_CLASS = "plan"
_INPUT_TOKENS = {"slots": 50, "KV memory": 400}
# By policy, of each seed: the mean time to the last token and its 99th percentile, seconds.
Means = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Material:
    """Of one answer. scores, trail_scores: ln P by bin at each age. exact: at some ages, see
    bench.prediction.plan_states.exact_scores."""

    length: int
    forecast: LengthDistribution
    scores: NDArray[np.float64]
    trail_scores: NDArray[np.float64]
    exact: Mapping[int, NDArray[np.float64]]


def requests_of(
    material: Sequence[Material], rate: float, input_tokens: int, seed: int, arm: str
) -> list[SimRequest]:
    """Poisson arrivals of all the answers, in random order."""
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / rate, len(material)))
    requests = []
    for number, place in enumerate(rng.permutation(len(material)).tolist()):
        one = material[place]
        scores = dict(enumerate(one.trail_scores if arm == "trail" else one.scores))
        requests.append(
            SimRequest(
                float(times_s[number]),
                input_tokens,
                one.length,
                CAP_TOKENS,
                one.forecast,
                _CLASS,
                scores=one.exact if arm.endswith(_EXACT) else scores,
            )
        )
    return requests


def engine_of(bound: str) -> Engine:
    """The H800 preset, where slots bind or KV memory does."""
    engine = PRESETS["h800-qwen3-32b"]
    if bound == "slots":
        return replace(engine, max_running_requests=16)
    return replace(engine, kv_pool_tokens=16_384)


def capacity(engine: Engine, material: Sequence[Material], input_tokens: int) -> float:
    """Requests a second that the engine serves if all wait at once, first come, first served."""
    burst = [
        replace(request, arrival_s=0.0)
        for request in requests_of(material, 1.0, input_tokens, 0, "fcfs")
    ]
    result = simulate(engine, "fcfs", SageConfig(), burst)
    return len(burst) / float(result.ttlt_s.max())


def main() -> None:
    """A table for each bound and load."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--probe", type=Path, required=True, metavar="FILE")
    parser.add_argument("--trail-probe", type=Path, required=True, metavar="FILE")
    parser.add_argument("--skip", type=int, default=1200, help="answers that were recorded")
    parser.add_argument("--answers", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--policies", nargs="+", default=_ARMS)
    parser.add_argument("--bounds", nargs="+", choices=_INPUT_TOKENS, default=[*_INPUT_TOKENS])
    parser.add_argument("--loads", type=float, nargs="+", default=[1.5, 2.0])
    args = parser.parse_args()
    define_missing()
    probes = [ProbeFile.read(args.probe), ProbeFile.read(args.trail_probe)]
    rows = plan_answers(args.model)[args.skip : args.skip + args.answers]
    known = forecasts_of_prompts([row["prompt"] for row in rows])
    reads = read_answers(args.model, rows, probes)
    material = [
        Material(len(row["tokens"]), forecast, scores, trail_scores, exact_scores(row))
        for row, forecast, (scores, trail_scores) in zip(rows, known, reads, strict=True)
    ]
    readings = {"trail": probes[1].reading, f"sage+{_EXACT}": exact_reading()}
    for bound in args.bounds:
        engine, input_tokens = engine_of(bound), _INPUT_TOKENS[bound]
        served = capacity(engine, material, input_tokens)
        for load in args.loads:
            means: Means = {arm: [] for arm in args.policies}
            for seed in range(args.seeds):
                for arm in args.policies:
                    requests = requests_of(material, load * served, input_tokens, seed, arm)
                    reading = readings.get(arm, probes[0].reading)
                    options = Options(preempt=True, reading=reading)
                    policy = arm.removesuffix(_EXACT)
                    result = simulate(engine, policy, SageConfig(), requests, options)
                    means[arm].append(mean_and_tail(result))
            print(f"\n{bound}, {load:g} times what fcfs serves ({served:.2f} requests/s)\n")
            print_table(means)


def mean_and_tail(result: Result) -> tuple[float, float]:
    """See Means."""
    return float(result.ttlt_s.mean()), float(np.percentile(result.ttlt_s, 99))


def print_table(means: Means) -> None:
    """Markdown: medians over seeds, and ratios of the means to sage's and trail's and of the 99th
    percentiles to sage's, paired."""
    print("| policy | mean, s | p99, s | mean to `sage` | mean to `trail` | p99 to `sage` |")
    print("|---|---|---|---|---|---|", flush=True)
    for policy, found in means.items():
        mean_s, tail_s = np.median(np.array(found), axis=0)
        ratios = [
            _ratio(found, means[other], column) if other in means else ""
            for other, column in (("sage", 0), ("trail", 0), ("sage", 1))
        ]
        print(f"| `{policy}` | {mean_s:.2f} | {tail_s:.1f} | {' | '.join(ratios)} |", flush=True)


def _ratio(
    ours: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], column: int
) -> str:
    ratios = np.array(ours)[:, column] / np.array(others)[:, column]
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(len(ratios), size=(2000, len(ratios)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
