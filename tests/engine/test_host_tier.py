"""The simulator's host memory against SGLang's hierarchical cache, request by request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.simulator.pool import KvPool
from bench.simulator.radix_tree import HostTier
from bench.simulator.request import Progress
from sage_sched.job import Job
from tests.bench.simulator.traffic import request
from tests.engine.serving import SageServer, generate

_POOL_TOKENS, _RATIO, _NUM_REQUESTS = 640, 1.5, 60
_RNG = np.random.default_rng(0)
# For each request, its document, its tokens of that document, and its own tokens. Together they
# fill the pool and host memory many times.
ASKED = [
    (int(_RNG.integers(6)), int(_RNG.integers(40, 180)), int(_RNG.integers(10, 80)))
    for _ in range(_NUM_REQUESTS)
]


def served(server: SageServer) -> list[tuple[int, int]]:
    """Return each request's cached tokens, and how many of these were in host memory."""
    found = []
    for number, (document, num_shared, num_own) in enumerate(ASKED):
        shared = [100 + document, *range(200, 199 + num_shared)]
        own = [400 + number, *[700 + (7 * number + place) % 250 for place in range(1, num_own)]]
        more = {"input_ids": shared + own, "sampling_params": {"ignore_eos": True}}
        meta = generate(server, None, 2, **more)["meta_info"]
        found.append((meta["cached_tokens"], (meta["cached_tokens_details"] or {}).get("host", 0)))
    return found


def simulated(write_policy: str) -> list[tuple[int, int]]:
    """Return the same from the simulator, by the steps of its executor."""
    host = HostTier(int(_POOL_TOKENS * _RATIO), write_policy == "write_back")
    pool, found = KvPool(_POOL_TOKENS, 1, host), []
    for number, (document, num_shared, num_own) in enumerate(ASKED):
        num_tokens = num_shared + num_own
        spans = ((document, 0, num_shared), (100 + number, 0, num_own))
        asked = request(0.0, num_tokens, 2, 2, spans=spans)
        progress = Progress(asked, number, Job(number, num_tokens, 2, None, 0))
        cached = pool.cached(progress)
        pool.enter(progress, cached)
        found.append((cached.num_tokens, cached.host_tokens))
        pool.hold(num_tokens - progress.tree_tokens)
        pool.publish(progress, num_tokens)
        progress.job.grow(1)
        pool.hold(1)
        pool.publish(progress, num_tokens + 1)
        pool.leave(progress)
    return found


@pytest.mark.long
@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_host_memory_holds_as_much(model: Path, tmp_path: Path, write_policy: str) -> None:
    flags = ["--max-total-tokens", f"{_POOL_TOKENS}", "--enable-hierarchical-cache"]
    flags += ["--hicache-ratio", f"{_RATIO}", "--hicache-write-policy", write_policy]
    with SageServer(model, tmp_path, flags=flags) as server:
        real = served(server)
    ours = simulated(write_policy)
    # Leaves of equal age are evicted in another order, and later results differ.
    assert sum(one == other for one, other in zip(real, ours, strict=True)) >= 0.75 * len(real)
    (cached, in_host), (our_cached, our_in_host) = np.sum(real, axis=0), np.sum(ours, axis=0)
    assert in_host > 500
    assert our_cached == pytest.approx(cached, rel=0.03)
    assert our_in_host == pytest.approx(in_host, rel=0.1)
