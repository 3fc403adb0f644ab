"""Detects changed decisions: `python -m tests.checks.fingerprint`.

It simulates every policy in a few regimes and prints a hash of the outcomes of all requests. The
same code gives the same hashes on any machine; a refactoring has to keep them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import product

import numpy as np
from tqdm import tqdm

from bench.policies.srpt_oracle import ORACLE
from bench.simulator.presets import H800_80GB_QWEN3_32B, H800_QWEN3_32B, Engine
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.simulator.stock import STOCK
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names
from sage_sched.distribution import LengthDistribution

_NUM_REQUESTS = 250
_CAP_TOKENS = 2048

# Each makes something scarce: KV, slots, KV in pages, or prefill with short chunks.
_REGIMES: dict[str, tuple[Engine, float]] = {
    "kv": (H800_80GB_QWEN3_32B, 6.0),
    "slots": (replace(H800_QWEN3_32B, max_running_requests=24), 3.0),
    "pages": (replace(H800_80GB_QWEN3_32B, page_size=16, kv_pool_tokens=12_000), 4.0),
    "chunks": (replace(H800_80GB_QWEN3_32B, chunked_prefill_size=256), 6.0),
}


def main() -> None:
    """Print a line per policy and regime: the hash, and the mean TTLT in seconds."""
    names = sorted({*policy_names(), *STOCK, ORACLE, "fcfs@conservativeness=0.3"})
    for regime, preempt, name in tqdm([*product(_REGIMES, (False, True), names)], unit="run"):
        engine, rate = _REGIMES[regime]
        result = simulate(engine, name, SageConfig(), _requests(rate), Options(preempt=preempt))
        digest = hashlib.sha256()
        for array in (result.ttft_s, result.ttlt_s, result.num_retractions, result.num_preemptions):
            digest.update(array.tobytes())
        case = f"{name} {regime}{' preempt' if preempt else ''}"
        tqdm.write(f"{case:48}{digest.hexdigest()[:16]} {result.ttlt_s.mean():.3f}")


def _requests(rate: float) -> list[SimRequest]:
    """Return requests whose prompts predict half of their lengths. A tenth has no prediction."""
    rng = np.random.default_rng(0)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, _NUM_REQUESTS))
    requests = []
    for number, arrival_s in enumerate(arrivals_s.tolist()):
        level = rng.normal(5.0, 1.0)
        known = np.exp(rng.normal(level, 0.6, 48)).astype(np.int64)
        lengths, counts = np.unique(np.clip(known, 1, _CAP_TOKENS), return_counts=True)
        predicted = LengthDistribution(lengths, counts / counts.sum(), 48.0, "history")
        requests.append(
            SimRequest(
                arrival_s=arrival_s,
                input_tokens=int(np.clip(np.exp(rng.normal(5.5, 1.2)), 4, 6000)),
                output_tokens=int(np.clip(np.exp(rng.normal(level, 0.6)), 1, _CAP_TOKENS)),
                max_new_tokens=_CAP_TOKENS,
                distribution=None if number % 10 == 9 else predicted,
                class_name="",
            )
        )
    return requests


if __name__ == "__main__":
    main()
