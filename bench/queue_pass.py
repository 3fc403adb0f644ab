"""How long a scheduler takes to sort its waiting queue, and to admit a request to it.

`python -m bench.queue_pass` times patches/ranker.py, the code that the scheduler runs, on queues
of requests with predicted lengths, and prints a table. No server is needed.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from patches.carrier import encode
from patches.ranker import Ranker
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.step_time import ServerFacts

QUEUE_LENGTHS = (100, 1_000, 10_000)
_NUM_PASSES = 50
_KV_POOL_TOKENS = 500_000


def _request(generator: np.random.Generator, max_atoms: int) -> Any:
    """What the ranker reads of a request (sglang/srt/managers/schedule_batch.py, Req)."""
    lengths = generator.lognormal(5.5, 1.0, max_atoms).astype(np.int64) + 1
    return SimpleNamespace(
        origin_input_ids=range(int(generator.integers(10, 2000))),
        output_ids=[],
        sampling_params=SimpleNamespace(
            max_new_tokens=4096,
            custom_params=encode(LengthDistribution.from_samples(lengths, "nearest")),
        ),
    )


def _timed_ms(action: Any) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def measure(num_waiting: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each admission, and of each pass with one newcomer since the last."""
    config = SageConfig()
    generator = np.random.default_rng(num_waiting)
    server = ServerFacts(_KV_POOL_TOKENS, 256, config.step_time.step_time())
    ranker = Ranker("sage", config.policy, server)
    requests = [
        _request(generator, config.predictor.max_atoms) for _ in range(num_waiting + _NUM_PASSES)
    ]
    admissions_ms = [_timed_ms(lambda req=req: ranker.arrived(req)) for req in requests]
    queue, newcomers = requests[:num_waiting], requests[num_waiting:]
    ranker.sort(queue)
    passes_ms = []
    for newcomer in newcomers:
        del queue[0]
        queue.append(newcomer)
        passes_ms.append(_timed_ms(lambda: ranker.sort(queue)))
    return admissions_ms, passes_ms


def main() -> None:
    print("waiting   ms a pass: median     p99   ms an admission: median     p99")
    for num_waiting in QUEUE_LENGTHS:
        admissions_ms, passes_ms = measure(num_waiting)
        print(
            f"{num_waiting:7,d} {np.median(passes_ms):19.3f} {np.quantile(passes_ms, 0.99):7.3f}"
            f" {np.median(admissions_ms):25.3f} {np.quantile(admissions_ms, 0.99):7.3f}"
        )


if __name__ == "__main__":
    main()
