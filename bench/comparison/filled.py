"""What filling the pool is worth: `python -m bench.comparison.filled --data DIR`.

Our policies against SGLang's at their best, simulated, on chat and reasoning traffic of about twice
what fcfs sustains. SGLang's are tuned for each load by all of GRID, on prompts and arrivals that
nothing is reported on; so are no settings of ours, which ship as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.engines.simulator.presets import H800_QWEN3_32B
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.workloads import datasets, reasoning
from bench.workloads.arrivals import poisson_arrivals
from bench.workloads.foresight import Foresight, heavy_tailed, token_counter, with_heavy_tail
from bench.workloads.prompts import WorkloadError, WorkloadRequest, sample, stable_hash
from predictor_store.terminal import at_least_one
from sage_sched.config import PredictorConfig, SageConfig

GRID = tuple(
    f"{policy}@clip={clip},conservativeness={share}"
    for policy, clip, share in product(
        ("shortest-prefill-first", "hrrn", "fcfs"), (128, 256, 512, 1024, 4096), (0.3, 1.0)
    )
)
OURS = ("sage", "sage-order", "fcfs-fill", "srpt-oracle")
TUNING_SEEDS, FIRST_SEED = (11, 12), 21
_COLUMNS = (
    ("mean, s", "mean_ttlt_s", 1.0), ("p99, s", "p99_ttlt_s", 1.0), ("TTFT, s", "mean_ttft_s", 1.0),
    ("tokens/s", "arriving_throughput", 1.0), ("longest gap, s", "longest_gap_s", 1.0),
    ("p99 ITL, ms", "p99_itl_s", 1e3), ("left", "num_out_of_memory", 1.0),
    ("retracted", "num_retractions", 1.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of a workload, so many at so many a second, each with this cap on its answer."""

    workload: str
    rate: float
    num_requests: int
    max_new_tokens: int


_CHAT, _REASONING = Part("chat", 8.0, 900, 4096), Part("reasoning", 1.6, 600, 16384)


@dataclass(frozen=True, slots=True)
class Load:
    """Parts, one after the other; is_heavy: one answer in ten 20 times longer; max_running_requests
    in the place of the engine's."""

    parts: tuple[Part, ...]
    is_heavy: bool = False
    max_running_requests: int = H800_QWEN3_32B.max_running_requests


LOADS = {
    "chat, 8/s": Load((_CHAT,)),
    "chat, 10/s": Load((replace(_CHAT, rate=10.0, num_requests=1100),)),
    "reasoning": Load((_REASONING,)),
    "chat, then reasoning": Load(
        (replace(_CHAT, num_requests=450), replace(_REASONING, num_requests=300))
    ),
    "heavy tails": Load((replace(_CHAT, rate=14.0, num_requests=1500),), is_heavy=True),
    "48 slots": Load(
        (replace(_CHAT, rate=4.5, num_requests=700),), max_running_requests=48
    ),
}  # fmt: skip


def drawn(
    requests: Sequence[WorkloadRequest], part: Part, seed: int, *, is_tuning: bool
) -> list[WorkloadRequest]:
    """Of one half of the prompts, the other being for what is tuned; again where they are too few,
    as they are for a load that lasts."""
    half = [r for r in requests if (stable_hash("half " + r.prompt) % 2 == 1) is is_tuning]
    chosen = sample(half, part.num_requests, seed, at_most=True)
    rng = np.random.default_rng([seed, 3])
    drawn = list(chosen)
    while len(drawn) < part.num_requests:
        drawn += [chosen[i] for i in rng.permutation(len(chosen))]
    return drawn[: part.num_requests]


def requests_of(
    load: Load, foresights: Mapping[str, Foresight], seed: int, *, is_tuning: bool
) -> list[SimRequest]:
    """As the simulator takes them."""
    requests: list[SimRequest] = []
    began_s = 0.0
    for part in load.parts:
        foresight = foresights[part.workload]
        chosen = drawn(foresight.workload.evaluation, part, seed, is_tuning=is_tuning)
        if load.is_heavy:
            chosen = heavy_tailed(chosen, seed)
        foresight.read(chosen)
        predict = foresight.semantic()
        if load.is_heavy:
            predict = with_heavy_tail(predict)
        arrivals_s = began_s + poisson_arrivals(len(chosen), seed) / part.rate
        cap = part.max_new_tokens
        requests += [
            SimRequest(
                float(at), foresight.input_tokens(r), min(r.output_tokens, cap), cap, predict(r),
                r.class_name,
            )
            for at, r in zip(arrivals_s, chosen, strict=True)
        ]  # fmt: skip
        began_s = requests[-1].arrival_s + 1 / part.rate
    return requests


def _simulated(job: tuple[str, Load, Sequence[SimRequest]]) -> tuple[str, dict[str, float]]:
    policy, load, requests = job
    engine = replace(H800_QWEN3_32B, max_running_requests=load.max_running_requests)
    return policy, simulate(engine, policy, SageConfig(), requests).metrics()


def compared(
    name: str, foresights: Mapping[str, Foresight], num_seeds: int, num_processes: int
) -> list[list[str]]:
    """Rows: the best of GRID by its mean, then ours; means over the seeds, and ratios to it."""
    load = LOADS[name]

    def means(
        policies: Sequence[str], seeds: Sequence[int], *, is_tuning: bool
    ) -> dict[str, dict[str, list[float]]]:
        jobs = [
            (policy, load, requests)
            for requests in (requests_of(load, foresights, s, is_tuning=is_tuning) for s in seeds)
            for policy in policies
        ]  # fmt: skip
        found: dict[str, dict[str, list[float]]] = {policy: {} for policy in policies}
        with get_context("fork").Pool(num_processes) as pool:
            runs = pool.imap(_simulated, jobs)
            for policy, metrics in tqdm(runs, total=len(jobs), desc=name, unit="run"):
                for metric, value in metrics.items():
                    found[policy].setdefault(metric, []).append(value)
        return found

    tuned = means(GRID, TUNING_SEEDS, is_tuning=True)
    best = min(tuned, key=lambda policy: float(np.mean(tuned[policy]["mean_ttlt_s"])))
    seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
    measured = means((best, *OURS), seeds, is_tuning=False)
    rows = []
    for policy, metrics in measured.items():
        ratios = [
            np.array(metrics[metric]) / np.array(measured[best][metric])
            for metric in ("mean_ttlt_s", "p99_ttlt_s")
        ]
        rows.append(
            [name, f"`{policy}`"]
            + [f"{np.mean(r):.2f} ({np.min(r):.2f} to {np.max(r):.2f})" for r in ratios]
            + [f"{np.mean(metrics[m]) * scale:.1f}" for _, m, scale in _COLUMNS]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2, with a line on stderr, where the data is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the datasets")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seeds", type=at_least_one, default=3, help="default: %(default)s")
    parser.add_argument("--processes", type=at_least_one, default=1, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        workloads = {"chat": datasets.load(args.data), "reasoning": reasoning.load(args.data)}
    except WorkloadError as error:
        print(f"filled: {error}", file=sys.stderr)
        return 2
    counter = token_counter()
    foresights = {
        name: Foresight(workload, PredictorConfig(), counter)
        for name, workload in workloads.items()
    }
    head = ["load", "policy", "mean to the best", "p99 to it", *(label for label, _, _ in _COLUMNS)]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for name in args.loads:
        for row in compared(name, foresights, args.seeds, args.processes):
            print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
