"""Recordings of our own making, in the files of those that the bench reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np


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
