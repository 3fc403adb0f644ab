"""What latency-sensitive requests wait for, by where best effort gives way, simulated:
`python -m bench.comparison.layer_cuts`.

A fifth of the requests is latency-sensitive (LS: 20 to 60 tokens in), the others are best effort
(BE: 2,000 to 3,500); answers have 32 tokens. Mixtral 8x7B on one GPU. Loads are shares of what
`fcfs` carries. With --frontier: LS against BE for BE prompts of 2k to 32k tokens, at the highest of
the loads, with nobody of BE before LS however old (--level-pools), so that only the cuts count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from bench.comparison.qllm_arms import (
    ANSWER_TOKENS,
    BE_TOKENS,
    Arm,
    arms,
    capacity,
    mixed,
    policy_of,
)
from bench.engines.simulator.presets import MIXTRAL_EXPERTS, MIXTRAL_LAYERS, PRESETS, Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.config import SageConfig

COLUMNS = (
    "LS TTFT p50, s", "LS TTFT p99, s", "LS TTFT mean, s", "LS TPOT, ms", "BE turnaround, s",
    "BE tokens/s", "tokens/s",
)  # fmt: skip
# Of COLUMNS: what the frontier draws, and what the gain is taken apart by.
LS_P99, LS_MEAN, BE_SPEED = 1, 2, 5
FRONTIER_TOKENS = (2_048, 4_096, 8_192, 16_384, 32_768)


def row(
    requests: Sequence[SimRequest],
    first_s: Sequence[float],
    last_s: Sequence[float],
) -> list[float]:
    """By COLUMNS. first_s, last_s: of each request, when its first and last token came. Speeds are
    of input and output tokens, until the last request's end."""
    came = np.array([request.arrival_s for request in requests])
    first, last = np.array(first_s), np.array(last_s)
    is_ls = np.array([request.class_name == "LS" for request in requests])
    tokens = np.array([request.input_tokens + request.output_tokens for request in requests])
    ttft = (first - came)[is_ls] if is_ls.any() else np.full(1, np.nan)
    tpot = (last - first)[is_ls] / (ANSWER_TOKENS - 1) if is_ls.any() else np.full(1, np.nan)
    began = came.min()
    return [
        *(float(np.percentile(ttft, percent)) for percent in (50, 99)),
        float(ttft.mean()),
        float(tpot.mean() * 1e3),
        float((last - came)[~is_ls].mean()),
        float(tokens[~is_ls].sum() / (last[~is_ls].max() - began)),
        float(tokens.sum() / (last.max() - began)),
    ]


def simulated(
    arm: Arm, engine: Engine, requests: Sequence[SimRequest], level_pools: float
) -> list[float]:
    """One run, by COLUMNS."""
    engine = arm.engine(engine)
    policy = policy_of(arm, engine, level_pools)
    result = simulate(engine, policy, SageConfig(), requests, Options(preempt=True))
    first_s = result.arrival_s + result.ttft_s
    last_s = result.arrival_s + result.ttlt_s
    return row(requests, first_s.tolist(), last_s.tolist())


def _of(args: argparse.Namespace) -> Engine:
    engine = replace(PRESETS[args.preset], slice_overhead_s=args.overhead_ms / 1e3)
    if args.free_reads:
        engine = replace(engine, step_time=replace(engine.step_time, prefill_base_s=0.0))
    return engine


def compare(args: argparse.Namespace) -> dict[tuple[float, str], list[float]]:
    """A table a load; medians over seeds, by load and arm."""
    engine = _of(args)
    carried = capacity(engine, args.num_requests, BE_TOKENS)
    found = {}
    for load in args.loads:
        print(f"\n{args.preset}, {load:g} x {carried:.3g} requests/s, {args.seeds} seeds\n")
        print(f"| arm | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
        asked = [
            mixed(
                load * carried,
                args.num_requests,
                seed,
                be_tokens=BE_TOKENS,
                ls_share=args.ls_share,
            )
            for seed in range(args.seeds)
        ]
        for arm in arms(MIXTRAL_LAYERS, MIXTRAL_EXPERTS):
            rows = [simulated(arm, engine, requests, args.level_pools) for requests in asked]
            medians = [float(np.median(column)) for column in zip(*rows, strict=True)]
            found[load, arm.label] = medians
            print(
                f"| {arm.label} | {' | '.join(f'{value:.3g}' for value in medians)} |", flush=True
            )
    return found


def taken_apart(
    found: dict[tuple[float, str], list[float]], load: float
) -> list[tuple[str, float]]:
    """By how many times LS waits less for its first token with each step: by order, prompts that
    are prefilled one by one, chunks, layers, experts. Mean TTFT of the best arm of one over that of
    the next."""
    stages: dict[str, float] = {}
    for arm in arms(MIXTRAL_LAYERS, MIXTRAL_EXPERTS):
        if arm.about:
            mean_s = found[load, arm.label][LS_MEAN]
            stages[arm.about] = min(mean_s, stages.get(arm.about, mean_s))
    return [(name, stages[before] / stages[name]) for before, name in pairwise(stages)]


def frontier(args: argparse.Namespace) -> list[tuple[int, str, float, float]]:
    """(BE prompt tokens, arm, LS TTFT p99 in s, BE tokens/s) at the highest load."""
    engine, points = _of(args), []
    print(f"\n{args.preset}, {max(args.loads):g} x capacity\n")
    print("| BE prompt | arm | LS TTFT p99, s | BE tokens/s |\n|---|---|---|---|")
    for num_tokens in FRONTIER_TOKENS:
        span = (num_tokens, num_tokens)
        number = max(100, args.num_requests * FRONTIER_TOKENS[0] // num_tokens)
        rate = max(args.loads) * capacity(engine, number, span)
        asked = [mixed(rate, number, seed, be_tokens=span) for seed in range(args.seeds)]
        for arm in arms(MIXTRAL_LAYERS, MIXTRAL_EXPERTS):
            if arm.about in ("", "fcfs"):
                continue
            rows = [simulated(arm, engine, requests, 1e3) for requests in asked]
            medians = [float(np.median(column)) for column in zip(*rows, strict=True)]
            points.append((num_tokens, arm.label, medians[LS_P99], medians[BE_SPEED]))
            print(
                f"| {num_tokens} | {arm.label} | {medians[LS_P99]:.3g} | {medians[BE_SPEED]:.4g} |",
                flush=True,
            )
    return points


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="a100-mixtral-8x7b")
    parser.add_argument("--loads", type=float, nargs="+", default=(0.7, 1.2), metavar="SHARE")
    parser.add_argument("--num-requests", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--ls-share", type=float, default=0.2, help="default: %(default)s")
    parser.add_argument("--level-pools", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument(
        "--overhead-ms", type=float, default=0.1, help="of a cut (default: %(default)s)"
    )
    parser.add_argument(
        "--free-reads", action="store_true",
        help="weights are read behind a prefill's arithmetic, so that chunks cost nothing",
    )  # fmt: skip
    parser.add_argument("--frontier", action="store_true", help="that, and no arms")
    args = parser.parse_args(argv)
    if args.frontier:
        frontier(args)
        return 0
    found = compare(args)
    shares = {load: taken_apart(found, load) for load in args.loads}
    for load, steps in shares.items():
        print(f"\n{load:g}: " + ", ".join(f"{name} {gain:.3g}x" for name, gain in steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
