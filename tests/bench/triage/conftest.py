from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bench.triage.requests import LABELS, LENGTHS


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """A folder of made-up ones."""
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
        (tmp_path / name).write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return tmp_path
