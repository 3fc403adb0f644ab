"""Made-up runs for the tests of what is done with runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.experiment.on_servers import record_of
from bench.experiment.records import Provenance, Record
from bench.experiment.stats import METRICS


def run(policy: str, seed: int, *, rate: str = "2x", factor: float = 1.0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    output_tokens = generator.integers(1, 900, 60)
    ttlt_ms = factor * (output_tokens * 20.0 + generator.exponential(5000, 60))
    return {
        "policy": policy,
        "rate": rate,
        "request_rate": 1.5,
        "seed": seed,
        "valid": True,
        "invalid_reason": None,
        **dict.fromkeys(METRICS, factor * (10.0 + seed)),
        "settings": {"hardware": "<two> cores"},
        "requests": {
            "class": ["chat"] * 60,
            "input_tokens": [30] * 60,
            "output_tokens": output_tokens.tolist(),
            "ttft_ms": (ttlt_ms / 3).tolist(),
            "e2e_latency_ms": ttlt_ms.tolist(),
            "slowdown": (ttlt_ms / (output_tokens * 20.0)).tolist(),
        },
    }


def recorded(runs: Sequence[dict[str, Any]]) -> list[Record]:
    """Of those that are valid."""
    return [record_of(run, METRICS, Provenance()) for run in runs if run["valid"]]


def record(policy: str, seed: int, *, rate: str = "2x", factor: float = 1.0) -> Record:
    return recorded([run(policy, seed, rate=rate, factor=factor)])[0]
