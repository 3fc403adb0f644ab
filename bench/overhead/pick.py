"""How long a router takes to pick a node, and to note that a request was sent there.

`python -m bench.overhead.pick` times sage_sched/routing/ledger.py and the dispatchers, with 64
unfinished requests a node, half of them without a first token, and prompts that share a beginning.
"""

from __future__ import annotations

import time

import numpy as np

from sage_sched.config import StepTimeConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from sage_sched.routing.ledger import Ledger, Newcomer
from sage_sched.routing.prefix_index import block_keys
from sage_sched.routing.routers import OURS, router_named
from sage_sched.steps.time import ServerFacts

NUM_NODES = (8, 32, 64)
_PER_NODE = 64
_NUM_PICKS = 200
_PROMPT_TOKENS = 2048
_SERVER = ServerFacts(72_000, 256, StepTimeConfig().step_time(), 0.0)


def newcomer(generator: np.random.Generator) -> Newcomer:
    """A request whose prompt begins like those of its group."""
    group = int(generator.integers(20))
    shared = list(range(group * 10_000, group * 10_000 + _PROMPT_TOKENS // 2))
    own = generator.integers(1_000_000, size=_PROMPT_TOKENS // 2).tolist()
    lengths = generator.integers(1, 2000, 64)
    return Newcomer(
        _PROMPT_TOKENS,
        4096,
        LengthDistribution.from_samples(lengths, "history"),
        block_keys([*shared, *own]),
        Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0),
    )


def measure(dispatch: str, num_nodes: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a core for each pick and each note, in a cluster that has its requests."""
    generator = np.random.default_rng(num_nodes)
    ledger, router = Ledger(num_nodes, _SERVER), router_named(dispatch)
    few = [newcomer(generator) for _ in range(100)]
    for rid in range(num_nodes * _PER_NODE):
        node = rid % num_nodes
        ledger.sent(rid, node, few[rid % len(few)], 0.0)
        if generator.random() < 0.5:
            ledger.grown(rid, node, int(generator.integers(1, 500)), 0.0)
    picks_ms, notes_ms = [], []
    for number in range(_NUM_PICKS):
        request = newcomer(generator)
        started_s = time.thread_time()
        node = router.pick(ledger.view(request, 1.0))
        picked_s = time.thread_time()
        ledger.sent(("new", number), node, request, 1.0)
        noted_s = time.thread_time()
        ledger.ended(("new", number), node, 1.0)
        picks_ms.append((picked_s - started_s) * 1e3)
        notes_ms.append((noted_s - picked_s) * 1e3)
    return picks_ms, notes_ms


def main() -> None:
    print("ms of a core, median and p99           a pick      to note it")
    for router in OURS:
        for num_nodes in NUM_NODES:
            columns = measure(router.name, num_nodes)
            cells = (f"{np.median(ms):8.3f} {np.quantile(ms, 0.99):8.3f}" for ms in columns)
            print(f"{router.name:15s} {num_nodes:3d} nodes", *cells)


if __name__ == "__main__":
    main()
