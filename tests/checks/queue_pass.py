"""Measures how long a scheduler takes to register a request, and to plan a whole pass.

`python -m tests.checks.queue_pass` times patches/scheduler/state.py, the code that the scheduler
runs, on requests with predicted lengths, and prints a table. A pass covers the view, the order, the
remaining needs of running requests, and preemptions. No server is needed. `--policy
proserve-expected` gives all requests deadlines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sage_sched.app.registry import policy_type
from sage_sched.job import NO_HINTS, Hints
from tests.checks.full_server import FullServer, any_request
from tests.patches.schedulers import MOST_RUNNING

QUEUE_LENGTHS = (100, 1_000, 10_000)
_NUM_PASSES = 50
_PROMISED = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0)


def _timed_ms(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return (time.perf_counter() - started_s) * 1e3


def measure(num_waiting: int, policy: str = "sage") -> tuple[list[float], list[float]]:
    """Return milliseconds of each arrival, and of each pass with one new request since the last."""
    hints = _PROMISED if policy_type(policy).uses_clock else NO_HINTS
    server = FullServer(num_waiting, _NUM_PASSES, policy, hints)
    passes_ms = []
    for number in range(_NUM_PASSES):
        server.next_step()
        server.state.jobs.ticked(0.05 * number)
        passes_ms.append(_timed_ms(server.take_pass))
    generator = np.random.default_rng(num_waiting)
    requests: list[Any] = [any_request(generator) for _ in range(_NUM_PASSES)]
    return [_timed_ms(partial(server.state.listeners.arrived, req)) for req in requests], passes_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="sage", help="default: %(default)s")
    policy = parser.parse_args().policy
    print(f"ms, median and p99       arrival    a whole pass, {MOST_RUNNING} running")
    for num_waiting in QUEUE_LENGTHS:
        columns = measure(num_waiting, policy)
        cells = (f"{np.median(ms):8.3f} {np.quantile(ms, 0.99):8.3f}" for ms in columns)
        print(f"{num_waiting:7,d} waiting", *cells)


if __name__ == "__main__":
    main()
