"""sage-sched bench cluster: which dispatcher serves many engines best, in the simulator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.cluster.loads import LOADS, Load, load_named
from bench.cluster.routers import ROUTERS, STOCK, router_named
from bench.engines.simulator.cluster import REPORT_S, simulate_cluster
from bench.engines.simulator.result import Result
from bench.engines.simulator.state import Options
from bench.workloads.prompts import WorkloadError
from predictor_store.terminal import add_json, at_least_one, print_json, speaker
from sage_sched.config import SageConfig

# Seeds below are for tuning.
_FIRST_SEED = 1000
_STOCK = [router.name for router in STOCK]
_COLUMNS = ("mean_ttlt_s", "p99_ttlt_s", "mean_ttft_s", "cached", "missed_tdg")
_LABELS = ("mean TTLT, s", "p99", "mean TTFT, s", "cached", "missed TDG")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=["mixed", "heavy-tailed", "agents", "azure"],
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--nodes", nargs="+", type=at_least_one, default=[8, 32, 64])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.7, 1.0, 1.5],
        help="times the capacity (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dispatch", nargs="+", choices=ROUTERS, default=ROUTERS, metavar="NAME",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--seeds", type=at_least_one, default=3, help="default: %(default)s")
    parser.add_argument(
        "--per-node", type=at_least_one, default=100,
        help="requests (or sessions) for each engine (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--report-s", type=float, default=REPORT_S,
        help="how often a dispatcher hears of its engines (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--policy", metavar="NAME", help="of each engine")
    parser.add_argument(
        "--tuning", action="store_true", help="the seeds and lengths that settings were chosen by"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="all numbers, as JSON lines")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where nothing can be simulated."""
    found: list[dict[str, object]] = []
    try:
        if not args.report_s > 0:
            raise ValueError(f"--report-s is {args.report_s}, allowed: above 0")
        for name in args.loads:
            load = load_named(name, args.data, tuning=args.tuning)
            for num_nodes in args.nodes:
                for rate in args.rates:
                    found += _compare(args, name, load, num_nodes, rate)
    except (WorkloadError, OSError, ValueError) as error:
        print(f"sage-sched bench cluster: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(found)
    return 0


def _compare(
    args: argparse.Namespace, name: str, load: Load, num_nodes: int, rate: float
) -> Iterator[dict[str, object]]:
    """Says, and gives, the numbers of every dispatcher."""
    policy, say = args.policy or load.policy, speaker(args)
    say(
        f"\n{name}: {num_nodes} engines under {policy}, {rate:g} times "
        f"{num_nodes * load.capacity:.3g} {load.unit}/s, {args.per_node} an engine, reports every "
        f"{args.report_s:g} s, means over {args.seeds} seeds\n"
    )
    labels = _LABELS if load.has_slo else _LABELS[:-1]
    say(f"| dispatch | {' | '.join(labels)} | to the best stock |\n|{'---|' * (len(labels) + 2)}")
    found: dict[str, dict[str, float]] = {}
    drawn = [
        load.requests(rate * load.capacity * num_nodes, args.per_node * num_nodes, seed)
        for seed in _seeds(args)
    ]
    for dispatch in args.dispatch:
        runs = []
        for seed, requests in zip(_seeds(args), drawn, strict=True):
            result = simulate_cluster(
                load.engine,
                num_nodes,
                policy,
                SageConfig(),
                requests,
                Options(preempt=True),
                router=router_named(dispatch, seed),
                report_s=args.report_s,
            )
            runs.append(_numbers(result))
            about = {"load": name, "nodes": num_nodes, "rate": rate, "dispatch": dispatch}
            numbers: dict[str, object] = {**about, "policy": policy, "seed": seed, **runs[-1]}
            _write(args.output, numbers)
            yield numbers
        found[dispatch] = _mean(runs)
    judged = "missed_tdg" if load.has_slo else "mean_ttlt_s"
    best = min((found[stock][judged] for stock in _STOCK if stock in found), default=np.nan)
    for dispatch, means in found.items():
        cells = [f"{means[key]:.4g}" for key in _COLUMNS[: len(labels)]]
        ratio = means[judged] / best if best else np.nan
        say(f"| `{dispatch}` | {' | '.join(cells)} | {ratio:.3f} |", flush=True)


def _seeds(args: argparse.Namespace) -> range:
    first = 100 if args.tuning else _FIRST_SEED
    return range(first, first + args.seeds)


def _numbers(result: Result) -> dict[str, float]:
    """cached: the share of prompts that nobody had to compute, retractions counted against it."""
    metrics = result.metrics()
    cached = 1 - result.prefill_tokens / float(result.input_tokens.sum())
    missed = 1 - float(result.attainment().get("tdg_ratio", 1.0))
    return {**metrics, "cached": cached, "missed_tdg": missed}


def _mean(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([numbers[key] for numbers in runs])) for key in _COLUMNS}


def _write(output: Path | None, numbers: dict[str, object]) -> None:
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")
