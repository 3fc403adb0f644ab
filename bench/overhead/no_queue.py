"""What a server with no queue loses by ordering it: `python -m bench.overhead.no_queue`.

A stock server and one of ours stand side by side, one stopped while the other serves the same few
requests, in short turns. The speed of a shared host drifts by more than what is looked for, but not
within seconds: the ratios are between neighbouring turns. (On a device clock it does not matter.)
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.comparison.stats import with_interval
from bench.engines.clock.device import DeviceUse, device_note
from bench.engines.server.client import drive
from bench.engines.server.kept_server import hurry_predictions, reset
from bench.engines.server.options import configure_servers, servers_of
from bench.engines.server.policy_server import internal_state, load_tokenizer
from bench.engines.server.server import Server, ServerError
from bench.workloads.arrivals import poisson_arrivals
from bench.workloads.prompts import WorkloadError, WorkloadRequest, sample
from bench.workloads.source import load_workload
from sage_sched.fields import ConfigError

_POLICIES = ("fcfs", "sage")
# How often a turn is made, at most, that a device clock's host holds up.
_TRIES = 3
_METRICS = ("mean_e2e_latency_ms", "p99_e2e_latency_ms", "mean_ttft_ms", "output_throughput")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configure_servers(parser, Path("results/no_queue"))
    parser.add_argument("--rate", type=float, default=1.3, help="requests/s; default: %(default)s")
    parser.add_argument("--turns", type=int, default=20, help="of each; default: %(default)s")
    parser.add_argument("--num-requests", type=int, default=16, help="a turn; default: %(default)s")
    parser.add_argument(
        "--max-new-tokens", type=int, default=2048,
        help="of an answer; with few, requests are alone and their TTFTs differ by little but what "
        "a policy adds; default: %(default)s",
    )  # fmt: skip
    args = parser.parse_args()
    try:
        turns = measure(args)
    except (ConfigError, ServerError, WorkloadError) as error:
        print(f"no_queue: {error}", file=sys.stderr)
        return 2
    if args.device_clock is not None:
        print(device_note({"device clock": args.device_clock, "speed": args.speed}))
    print(f"{args.turns} turns of {args.num_requests} requests at {args.rate:g} requests/s")
    for metric in _METRICS:
        stock, ours = (np.array([turn[metric] for turn in turns[policy]]) for policy in _POLICIES)
        print(
            f"{metric:22} fcfs {np.median(stock):9.2f}   sage {np.median(ours):9.2f}   "
            f"ratio {with_interval((ours / stock).tolist(), digits=3)}"
        )
    return 0


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """SGLang's metrics of each turn, by policy."""
    workload = load_workload(args.data, args.workload)
    servers = servers_of(args, {})
    servers.warm(workload.observations())
    warm_up = sample(workload.history, 8, seed=0)
    turns = [sample(workload.evaluation, args.num_requests, seed) for seed in range(args.turns)]
    servers.foresee([*warm_up, *chain.from_iterable(turns)])
    tokenizer = load_tokenizer(servers.model)
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in _POLICIES}

    def turn(server: Server, chosen: list[WorkloadRequest], seed: int) -> dict[str, Any]:
        for _ in range(_TRIES):
            metrics, late = tried(server, chosen, seed)
            if not late:
                return metrics
            tqdm.write(f"{late}; once more")
            # It must not find its own prompts and answers.
            server.resume()
            reset(server)
            hurry_predictions(server)
            server.pause()
        raise ServerError(late)

    def tried(
        server: Server, chosen: list[WorkloadRequest], seed: int
    ) -> tuple[dict[str, Any], str]:
        arrivals_s = [float(t) / args.rate for t in poisson_arrivals(len(chosen), seed)]
        server.resume()
        before = internal_state(server)
        result = drive(
            server.url, chosen, arrivals_s, tokenizer=tokenizer,
            max_new_tokens=args.max_new_tokens, timeout_s=300.0, label=f"turn {seed}",
            speed=servers.speed,
        )  # fmt: skip
        after = internal_state(server)
        server.pause()
        if problem := result.problem():
            raise ServerError(problem)
        if servers.device is None:
            return result.metrics, ""
        return result.metrics, DeviceUse.between(before, after, servers.speed).problem()

    with servers.server("fcfs", "fcfs") as stock:
        stock.pause()
        with servers.server("sage", "sage") as ours:
            if servers.device is not None:
                hurry_predictions(ours)
            pair = dict(zip(_POLICIES, (stock, ours), strict=True))
            for server in pair.values():
                turn(server, warm_up, 0)
            for seed, chosen in enumerate(tqdm(turns, desc="turns")):
                for policy in _POLICIES if seed % 2 == 0 else _POLICIES[::-1]:
                    found[policy].append(turn(pair[policy], chosen, seed))
            stock.resume()
            ours.resume()
    return found


if __name__ == "__main__":
    sys.exit(main())
