"""Made-up recordings, in the files that the bench reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from bench.workloads.triage import LABELS, LENGTHS


def azure_like(folder: Path) -> Path:
    """300 requests, a second apart; the folder."""
    rng = np.random.default_rng(0)
    rows = [
        {"t": float(i), "input_tokens": int(n), "output_tokens": int(o)}
        for i, (n, o) in enumerate(rng.integers([50, 5], [3000, 200], (300, 2)))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "trace_azure2023_conv.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def triage_like(folder: Path) -> Path:
    """50 complaints of all levels, and 60 lengths; the folder."""
    rng = np.random.default_rng(0)
    labels = [
        {"prompt": f"complaint {i}", "urgency_ktas": 1 + i % 5, "urgency_nurse": 1 + (i + 1) % 5}
        for i in range(50)
    ]
    lengths = [
        {
            "priority": i % 5,
            "prompt_len": int(rng.integers(50, 300)),
            "output_len": int(rng.integers(5, 400)),
        }
        for i in range(60)
    ]
    for name, rows in ((LABELS, labels), (LENGTHS, lengths)):
        (folder / name).write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return folder
