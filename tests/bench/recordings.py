"""Made-up recordings, in the files that the bench reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads.agents import TRACE
from bench.workloads.triage import LABELS, LENGTHS


def write(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines, and return the folder."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()))
    return file.parent


def azure_like(folder: Path) -> Path:
    """Write 300 requests, ever further apart, and return the folder."""
    lengths = np.random.default_rng(0).integers([50, 5], [3000, 200], (300, 2)).tolist()
    rows = (
        {"t": i**1.5, "input_tokens": n, "output_tokens": o} for i, (n, o) in enumerate(lengths)
    )
    return write(folder / "trace_azure2023_conv.jsonl.gz", rows)


def triage_like(folder: Path) -> Path:
    """Write 50 complaints of all levels, and 60 lengths. Return the folder."""
    levels = [{"urgency_ktas": 1 + i % 5, "urgency_nurse": 1 + (i + 1) % 5} for i in range(50)]
    lengths = np.random.default_rng(0).integers([50, 5], [300, 400], (60, 2)).tolist()
    write(folder / LENGTHS, ({"prompt_len": n, "output_len": o} for n, o in lengths))
    complaints = ({"prompt": f"complaint {i}", **level} for i, level in enumerate(levels))
    return write(folder / LABELS, complaints)


def agents_like(folder: Path) -> Path:
    """Write 20 sessions of 8 steps, each of which continues an earlier step. Return the folder."""
    rng = np.random.default_rng(0)
    steps = [
        [60.0 * i, 1000 * (i + 1), int(rng.integers(0, 300)), int(rng.integers(-1, i)) if i else -1,
         int(rng.integers(1000))]
        for i in range(8)
    ]  # fmt: skip
    return write(folder / TRACE, ({"session": f"s{n}", "requests": steps} for n in range(20)))
