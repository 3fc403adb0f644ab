"""sage-sched bench agents: sessions of coding agents, in the simulator or on a device clock.

Sessions come at random; within one, a step waits for the answer to the one before. Their answers
have lengths that no text foretells here: all are foreseen alike.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.comparison.session_bodies import Serve, served, session_servers, simulated
from bench.comparison.session_source import source_of
from bench.engines.clock.device import Device
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.server import ServerError
from bench.engines.server.session_client import Times
from bench.engines.simulator.presets import PRESETS, Engine
from bench.engines.simulator.request import SimRequest
from bench.rival import simulated_policy
from bench.workloads.agents import TRACE
from bench.workloads.prompts import WorkloadError
from predictor_store.terminal import add_json, print_json, speaker

DEFAULT_POLICIES = ("fcfs", "lpm", "hrrn", "uniboost", "sage-order", "sage")
_COLUMNS = ("session s", "p99", "step s", "first TTFT p99, s", "TTFT p99, s", "cached", "tokens/s")


def configure(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="DIR", help=f"has {TRACE}")
    source.add_argument(
        "--mooncake", type=Path, metavar="FILE",
        help="a trace of your own in Mooncake's format (as aiperf's too): its requests come by the "
        "clock, and one of no session_id is a session by itself",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="+", default=DEFAULT_POLICIES, type=simulated_policy, metavar="NAME",
        help="as of sage-sched bench (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.005, 0.008], metavar="RATE",
        help="sessions a second; of a Mooncake trace: how many times as fast as recorded "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--num-sessions", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--max-steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--max-pause-s", type=float, default=300.0, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--held-out", action="store_true",
        help="the half of the sessions that nothing was tuned on (default: the other half)",
    )  # fmt: skip
    parser.add_argument("--preset", choices=PRESETS, default="h800-qwen3-32b")
    parser.add_argument(
        "--shrink", type=float, default=1.0, metavar="FACTOR",
        help="an engine with so many times fewer tokens of KV, each of which takes so many times "
        "as long; the sessions shrink alike (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--on-servers", action="store_true", help="on the preset's device clock too"
    )
    parser.add_argument("--speed", type=float, default=4.0, help="of the clock")
    parser.add_argument("--output", type=Path, default=Path("results/agents"), metavar="DIR")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, if there are no sessions or a server fails."""
    try:
        rows = _compare(args)
    except (ServerError, WorkloadError) as error:
        print(f"sage-sched bench agents: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(rows)
    return 0


def _compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Says, and gives, the numbers of every policy: medians over seeds."""
    say, found = speaker(args), list[dict[str, Any]]()
    engine = shrunk(PRESETS[args.preset], args.shrink)
    source = source_of(args, engine)
    tokens = f"{engine.kv_pool_tokens} tokens of KV; token counts / {source.factor:.1f}"
    say(f"{args.preset}, {tokens}")
    with contextlib.ExitStack() as stack:
        bodies: dict[str, Serve] = {"simulated": partial(simulated, engine)}
        if args.on_servers:
            device = replace(Device.named(args.preset, args.speed), engine=engine)
            servers = session_servers(args.output, device, source.foreseen)
            bodies["device clock"] = partial(served, stack.enter_context(KeptServer(servers)))
        for rate in args.rates:
            say(f"\n{rate:g} {source.rate_unit}\n\n| | {' | '.join(_COLUMNS)} |\n|{'---|' * 8}")
            for policy, (name, serve) in product(args.policies, bodies.items()):
                chosen = (source.requests(rate, seed) for seed in range(source.num_seeds))
                rows = [_row(asked, *serve(policy, asked)) for asked in chosen]
                medians = [median(column) for column in zip(*rows, strict=True)]
                cells = (f"{value:.4g}" for value in medians)
                say(f"| `{policy}` {name} | {' | '.join(cells)} |", flush=True)
                about = {"rate": rate, "policy": policy, "by": name}
                found.append(about | dict(zip(_COLUMNS, medians, strict=True)))
    return found


def shrunk(engine: Engine, factor: float) -> Engine:
    """An engine for which a token is what so many are for the given one."""
    step = engine.step_time
    return replace(
        engine,
        step_time=replace(
            step,
            prefill_token_s=step.prefill_token_s * factor,
            prefill_pair_s=step.prefill_pair_s * factor**2,
            decode_kv_token_s=step.decode_kv_token_s * factor,
        ),
        kv_pool_tokens=int(engine.kv_pool_tokens / factor),
        chunked_prefill_size=int(engine.chunked_prefill_size / factor),
        max_prefill_tokens=int(engine.max_prefill_tokens / factor),
        swap_token_s=engine.swap_token_s * factor,
    )


def _row(requests: Sequence[SimRequest], times: Sequence[Times], cached_tokens: int) -> list[float]:
    """By _COLUMNS. A session's time is that of its steps, without the pauses between them."""
    spent_s: dict[str, float] = defaultdict(float)
    for request, each in zip(requests, times, strict=True):
        spent_s[request.hints.session] += each.last_token_s - each.arrival_s
    session_s = [*spent_s.values()]
    ttft_s = [each.first_token_s - each.arrival_s for each in times]
    first_s = [s for s, request in zip(ttft_s, requests, strict=True) if request.follows is None]
    duration_s = max(each.last_token_s for each in times)
    return [
        float(np.mean(session_s)),
        float(np.percentile(session_s, 99)),
        sum(session_s) / len(times),
        float(np.percentile(first_s, 99)),
        float(np.percentile(ttft_s, 99)),
        cached_tokens / sum(request.input_tokens for request in requests),
        sum(request.output_tokens for request in requests) / duration_s,
    ]
