"""How long a scheduler takes to note a request, and for a whole pass: the view of its facts, the
order, what running requests will still need, and who yields.

`python -m bench.overhead.queue_pass` times patches/scheduler_state.py, the code that the scheduler
runs, on requests with predicted lengths, and prints a table. No server is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.overhead.full_server import NUM_RUNNING, FullServer, StandInRequest

QUEUE_LENGTHS = (100, 1_000, 10_000)
_NUM_PASSES = 50


def _timed_ms(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return (time.perf_counter() - started_s) * 1e3


def measure(num_waiting: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each arrival, and of each pass with one newcomer since the last."""
    server = FullServer(num_waiting, _NUM_PASSES)
    passes_ms = []
    for _ in range(_NUM_PASSES):
        server.step()
        passes_ms.append(_timed_ms(server.take_pass))
    generator = np.random.default_rng(num_waiting)
    requests: list[Any] = [StandInRequest(generator) for _ in range(_NUM_PASSES)]
    return [_timed_ms(partial(server.state.jobs.arrived, req)) for req in requests], passes_ms


def main() -> None:
    print(f"ms, median and p99       arrival    a whole pass, {NUM_RUNNING} running")
    for num_waiting in QUEUE_LENGTHS:
        columns = measure(num_waiting)
        cells = (f"{np.median(ms):8.3f} {np.quantile(ms, 0.99):8.3f}" for ms in columns)
        print(f"{num_waiting:7,d} waiting", *cells)


if __name__ == "__main__":
    main()
