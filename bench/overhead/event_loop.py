"""What prediction adds to the pauses of the HTTP server's event loop, and how soon it comes.

`python -m bench.overhead.event_loop` starts a stock server and one of ours in turn, sends both the
same requests with short answers, and prints by how much a task that wants to wake every millisecond
overslept (heartbeat.py). On a host with few cores the pauses are the processes' waits for one
another too, hence the stock server beside ours, several seeds, and the median over them.

`--busy 8` has the engine decode so many long answers meanwhile. `--device-clock` leaves the host a
core, as a GPU does; vectors are made as ever. `--rate 1` has one request at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import requests
from tqdm import tqdm

from bench.engines.server.client import drive
from bench.engines.server.options import configure_servers, servers_of
from bench.engines.server.policy_server import PolicyServers, load_tokenizer, scheduler_state
from bench.engines.server.server import Server
from bench.workloads.arrivals import poisson_arrivals
from bench.workloads.prompts import Workload, WorkloadRequest, sample
from bench.workloads.source import load_workload

_COMMAND = (sys.executable, "-m", "bench.overhead.heartbeat")
_POLICIES = ("fcfs", "sage")
_NUM_HISTORY = 1_000
# Short: the engine must not be what is slow.
_OUTPUT_TOKENS = 8
# Of those that keep the engine busy: the end of a run ends them.
_LONG_TOKENS = 3000


def measure(
    servers: PolicyServers,
    workload: Workload,
    policy: str,
    seed: int,
    rate: float,
    seconds: float,
    busy: int,
) -> dict[str, float]:
    """The pauses of one run, in milliseconds, as heartbeat.py names them, and under ours what
    /server_info says of the predictor."""
    chosen = [
        WorkloadRequest(request.prompt, _OUTPUT_TOKENS, request.class_name)
        for request in sample(workload.evaluation, round(rate * seconds), seed)
    ]
    with servers.server(policy, policy, _COMMAND) as server, _busy(server, busy):
        requests.get(f"{server.url}/heartbeat", timeout=30)
        result = drive(
            server.url,
            chosen,
            [float(t) / rate for t in poisson_arrivals(len(chosen), seed)],
            tokenizer=load_tokenizer(servers.model),
            max_new_tokens=64,
            timeout_s=120.0,
            label=f"{policy}, seed {seed}",
        )
        if problem := result.problem():
            raise RuntimeError(problem)
        pauses: dict[str, float] = requests.get(f"{server.url}/heartbeat", timeout=30).json()
        predictor: dict[str, float] = scheduler_state(server).get("predictor", {})
        return pauses | predictor


@contextlib.contextmanager
def _busy(server: Server, num_requests: int) -> Iterator[None]:
    """So many long answers are decoded meanwhile."""
    sampling = {"max_new_tokens": _LONG_TOKENS, "ignore_eos": True}
    body = {"text": "Go on and on.", "sampling_params": sampling}

    def go_on() -> None:
        with contextlib.suppress(requests.RequestException):
            requests.post(f"{server.url}/generate", json=body, timeout=3600)

    with ThreadPoolExecutor(max(num_requests, 1)) as pool:
        for _ in range(num_requests):
            pool.submit(go_on)
        try:
            yield
        finally:
            requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configure_servers(parser, Path("results/event_loop"))
    parser.add_argument("--busy", type=int, default=0, help="long answers; default: %(default)s")
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=30.0, help="a run; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    workload = load_workload(args.data, args.workload)
    servers = replace(servers_of(args, {}), recalls=False)
    servers.warm(workload.observations()[:_NUM_HISTORY])
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in _POLICIES}
    for seed in tqdm(range(args.seeds), desc="seeds"):
        for policy in _POLICIES if seed % 2 == 0 else _POLICIES[::-1]:
            run = measure(servers, workload, policy, seed, args.rate, args.seconds, args.busy)
            found[policy].append(run)
    print(f"pauses of the event loop at {args.rate:g} requests/s, ms, median over seeds (range)")
    for quantile in ("p99_ms", "p999_ms", "longest_ms"):
        cells = []
        for policy in _POLICIES:
            values = [run[quantile] for run in found[policy]]
            cells.append(
                f"{policy} {np.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            )
        added = np.median(
            [ours[quantile] - stock[quantile] for stock, ours in zip(*found.values(), strict=True)]
        )
        print(f"{quantile.removesuffix('_ms'):8} {'   '.join(cells)}   added {added:+.1f}")
    p50_ms, p99_ms, misses = np.median(
        [
            [run[f"prediction_latency_{q}_ms"] for q in ("p50", "p99")]
            + [run["num_deadline_misses"]]
            for run in found["sage"]
        ],
        axis=0,
    )
    print(
        f"a prediction comes after {p50_ms:.2f} ms (median; p99 {p99_ms:.1f}); {misses:.0f} of "
        f"{round(args.rate * args.seconds)} requests went on without, past the deadline"
    )


if __name__ == "__main__":
    main()
