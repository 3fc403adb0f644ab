"""Made-up runs for the tests of what is done with runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.comparison.stats import METRICS


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
