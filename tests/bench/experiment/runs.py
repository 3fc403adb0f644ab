"""Made-up runs for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bench.experiment.records import METRIC_LISTS, Record

SETTINGS = {"device clock": "h800-qwen3-32b", "speed": 2.0, "cpu": "<two> cores"}


def record(policy: str, seed: int, *, rate: str = "2x", factor: float = 1.0) -> Record:
    return Record(
        experiment="", load=rate, arm=policy, policy=policy, seed=seed, engine="server",
        metrics=dict.fromkeys(METRIC_LISTS["kept"], factor * (10.0 + seed)),
    )  # fmt: skip


def on_server(policy: str, seed: int, problem: str = "", **more: Any) -> Record:
    """Return a record with the details of a run on servers."""
    ttlt_ms = np.linspace(1000.0, 9000.0, 60).tolist()
    requests = {
        "class": ["chat"] * 60, "input_tokens": [30] * 60, "output_tokens": [50] * 60,
        "sent_ms": [500] * 60, "ttft_ms": [100] * 60, "e2e_latency_ms": ttlt_ms,
        "pauses_s": [[]] * 60,
    }  # fmt: skip
    about = {"settings": SETTINGS, "counters": {}, "requests": requests}
    return replace(record(policy, seed, **more), problem=problem, about=about)
