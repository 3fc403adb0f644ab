"""How long a scheduler takes to admit a request, to sort its waiting queue, and for a whole pass:
to sort, to foresee what running requests will still need, and to plan who yields.

`python -m bench.overhead.queue_pass` times patches/ranker.py and patches/turns.py, the code that
the scheduler runs, on requests with predicted lengths, and prints a table. No server is needed.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.overhead.full_server import NUM_RUNNING, FullServer, StandInRequest, ranker
from sage_sched.config import SageConfig

QUEUE_LENGTHS = (100, 1_000, 10_000)
_NUM_PASSES = 50


def _timed_ms(action: Any) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def measure(num_waiting: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each admission, and of each pass with one newcomer since the last."""
    config = SageConfig()
    generator = np.random.default_rng(num_waiting)
    ranks = ranker(config)
    requests = [
        StandInRequest(generator, config.predictor.max_atoms)
        for _ in range(num_waiting + _NUM_PASSES)
    ]
    admissions_ms = [_timed_ms(lambda req=req: ranks.arrived(req)) for req in requests]
    queue, newcomers = requests[:num_waiting], requests[num_waiting:]
    ranks.sort(queue)
    passes_ms = []
    for newcomer in newcomers:
        del queue[0]
        queue.append(newcomer)
        passes_ms.append(_timed_ms(lambda: ranks.sort(queue)))
    return admissions_ms, passes_ms


def measure_turns(num_waiting: int) -> list[float]:
    """Milliseconds of all that is ours in a pass: the queue sorted, the running requests' needs
    foreseen, and who yields to whom."""
    server = FullServer(num_waiting, _NUM_PASSES)
    spent_ms = []
    for _ in range(_NUM_PASSES):
        server.step()
        spent_ms.append(_timed_ms(server.take_turns))
    return spent_ms


def main() -> None:
    print(
        f"ms, median and p99     admission           sorting    a whole pass, {NUM_RUNNING} running"
    )
    for num_waiting in QUEUE_LENGTHS:
        columns = [*measure(num_waiting), measure_turns(num_waiting)]
        cells = (f"{np.median(ms):8.3f} {np.quantile(ms, 0.99):8.3f}" for ms in columns)
        print(f"{num_waiting:7,d} waiting", *cells)


if __name__ == "__main__":
    main()
