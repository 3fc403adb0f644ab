"""sage-sched bench slo: deadlines and priorities, ours and rivals, in the simulator."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines.server.server import ServerError
from bench.slo.lengths import RECORDINGS, read_lengths
from bench.slo.rivals import RIVALS
from bench.slo.runs import ABLATIONS, OURS, STOCK, Serve, Setting, numbers_of
from bench.slo.servers import PRIORITY_FLAG, Servers
from bench.workloads.arrivals import LOADS
from bench.workloads.prompts import WorkloadError
from predictor_store.terminal import add_json, at_least_one, print_json, speaker

EVERYONE = (*STOCK, *RIVALS, "sage", *OURS, *ABLATIONS)
# Seeds below are for tuning.
_FIRST_SEED = 1000
_COLUMNS = (
    ("TDG", "tdg_ratio", 3),
    ("missed", "missed_tdg", 3),
    ("attained", "slo_attainment", 3),
    ("goodput/s", "request_goodput", 2),
    ("p99 TTFT low, s", "p99_ttft_low_s", 1),
    ("tokens/s", "output_throughput", 0),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--lengths", nargs="+", choices=RECORDINGS, default=["azure", "mooncake"],
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="+", default=EVERYONE, metavar="NAME", help="default: %(default)s"
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.5, 1.0, 1.5],
        help="times the capacity (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=at_least_one, default=5, help="default: %(default)s")
    parser.add_argument("--num-requests", type=at_least_one, default=400, help="a run")
    parser.add_argument("--load", choices=LOADS, default="sustained", help="default: %(default)s")
    parser.add_argument(
        "--weights",
        nargs="+",
        type=float,
        default=[2.0, 1.0],
        help="of the classes, in equal shares",
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=1.0,
        help="by how much steps take longer than policies are told",
    )
    parser.add_argument("--unmixed", action="store_true", help="no --enable-mixed-chunk")
    parser.add_argument(
        "--tuning", action="store_true", help="the seeds and lengths that settings were chosen by"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="all numbers, as JSON lines")
    parser.add_argument(
        "--on-servers", action="store_true",
        help="real servers on the device clock, in the place of the simulator; all answers are "
        f"foreseen alike. POLICY+priority: with {PRIORITY_FLAG}",
    )  # fmt: skip
    parser.add_argument("--speed", type=float, default=4.0, help="of the clock")
    add_json(parser)
    parser.add_argument("--servers", type=Path, default=Path("results/slo"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where nothing can be simulated."""
    rows: list[dict[str, Any]] = []
    try:
        for name in args.lengths:
            lengths = read_lengths(args.data, name, held_out=not args.tuning)
            setting = Setting(lengths, weights=tuple(args.weights), load=args.load, pace=args.pace)
            if args.unmixed:
                setting = replace(setting, engine=replace(setting.engine, mixed_chunk=False))
            speaker(args)(f"\n{name}: {_about(args, setting)}", flush=True)
            with contextlib.ExitStack() as stack:
                serve: Serve = setting.served
                if args.on_servers:
                    servers = Servers(setting, args.servers, args.speed)
                    serve = stack.enter_context(contextlib.closing(servers))
                rows += _compare(args, name, setting, serve)
    except (ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"sage-sched bench slo: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(rows)
    return 0


def _compare(
    args: argparse.Namespace, name: str, setting: Setting, serve: Serve
) -> Iterator[dict[str, Any]]:
    """Says, and gives, the numbers of every policy at every rate."""
    capacity, say = setting.capacity(), speaker(args)
    for rate in args.rates:
        names = [label for label, _, _ in _COLUMNS]
        say(f"\n{rate:g} times {capacity:.2f} requests/s\n\n| policy | {' | '.join(names)} |")
        say(f"|{'---|' * (1 + len(names))}")
        for policy in args.policies:
            found = list(_runs(args, setting, serve, policy, rate * capacity))
            cells = [f"{_mean(found, key):.{digits}f}" for _, key, digits in _COLUMNS]
            say(f"| `{policy}` | {' | '.join(cells)} |", flush=True)
            about = {"lengths": name, "rate": rate, "policy": policy}
            rows = [{**about, "seed": seed, **numbers} for seed, numbers in enumerate(found)]
            if args.output is not None:
                with args.output.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            yield from rows


def _runs(
    args: argparse.Namespace, setting: Setting, serve: Serve, policy: str, rate: float
) -> Iterator[dict[str, Any]]:
    lightest = f"w{min(args.weights):g}"
    for seed in range(args.seeds):
        first = 100 if args.tuning else _FIRST_SEED
        requests = setting.requests(rate, args.num_requests, first + seed)
        yield numbers_of(serve(policy, requests), lightest)


def _mean(found: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([numbers[name] for numbers in found]))


def _about(args: argparse.Namespace, setting: Setting) -> str:
    lengths = setting.lengths
    return (
        f"{lengths.input_tokens.mean():.0f} tokens in, {lengths.output_tokens.mean():.0f} out on "
        f"average; first tokens count for {lengths.first_token_weight:.1f}; TTFT "
        f"{setting.ttft_slo_ms:g} ms, TPOT {setting.tpot_slo_ms:g} ms; {args.load} load, "
        f"{args.num_requests} requests a run, means over {args.seeds} seeds"
    )
