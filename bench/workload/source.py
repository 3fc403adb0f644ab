"""Where a workload comes from: a data folder, or the generator."""

from __future__ import annotations

from pathlib import Path

from bench.workload import datasets, synthetic
from bench.workload.prompts import Workload, WorkloadError


def load_workload(data: Path | None, heavy_tailed: bool = False) -> Workload:
    """From the data folder, or generated. Raises WorkloadError, for both at once too."""
    if data is not None and heavy_tailed:
        raise WorkloadError("--heavy-tailed makes its own prompts: it does not go with --data")
    if data is not None:
        return datasets.load(data)
    make = synthetic.generate_heavy_tailed if heavy_tailed else synthetic.generate
    return make(3000, seed=0)
