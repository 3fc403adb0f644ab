"""Where a workload comes from: a data folder, or the generator."""

from __future__ import annotations

from pathlib import Path

from bench.workloads import datasets, reasoning, synthetic
from bench.workloads.prompts import Workload, WorkloadError

WORKLOADS = ("mixed", "reasoning", "heavy-tailed")


def load_workload(data: Path | None, name: str = "mixed") -> Workload:
    """One of WORKLOADS, from the data folder, or generated. Raises WorkloadError where the one is
    needed, or the other."""
    if name == "heavy-tailed":
        if data is not None:
            raise WorkloadError("heavy-tailed makes its own prompts: it does not go with --data")
        return synthetic.generate_heavy_tailed(3000, seed=0)
    if name == "reasoning":
        if data is None:
            raise WorkloadError("reasoning needs prompts and lengths: give --data")
        return reasoning.load(data)
    return synthetic.generate(3000, seed=0) if data is None else datasets.load(data)
