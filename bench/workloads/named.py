"""The workloads that a name stands for: of a data folder, or generated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.workloads import chats, datasets, real, reasoning, synthetic
from bench.workloads.prompts import Workload, WorkloadError

# mixed: real prompts, half of the lengths drawn; generated ones without a data folder.
_OF_DATA: dict[str, Callable[[Path], Workload]] = {
    "mixed": datasets.load,
    "real": real.load,
    "repeated": real.load_repeated,
    "reasoning": reasoning.load,
}
_GENERATED: dict[str, Callable[[], Workload]] = {
    "chats": chats.answered,
    "mixed": lambda: synthetic.generate(3000, seed=0),
    "heavy-tailed": lambda: synthetic.generate_heavy_tailed(3000, seed=0),
}
WORKLOADS = tuple(dict.fromkeys((*_OF_DATA, *_GENERATED)))


def load_workload(data: Path | None, name: str = "mixed") -> Workload:
    """One of WORKLOADS, from the data folder, or generated. Raises WorkloadError where the one is
    needed, or the other."""
    if name not in WORKLOADS:
        raise WorkloadError(f"there is no workload {name!r}, allowed: {', '.join(WORKLOADS)}")
    if data is None:
        if name not in _GENERATED:
            raise WorkloadError(f"{name} needs prompts and lengths: give --data")
        return _GENERATED[name]()
    if name not in _OF_DATA:
        raise WorkloadError(f"{name} makes its own prompts: it does not go with --data")
    return _OF_DATA[name](data)
