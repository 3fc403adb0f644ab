"""The sources that an experiment's workload names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.experiment.spec import Arm, Load, SpecError
from bench.workloads.agents import Agents
from bench.workloads.lengths import RECORDINGS, Promised
from bench.workloads.mooncake import MooncakeTrace
from bench.workloads.named import WORKLOADS
from bench.workloads.prompt_source import Prompts
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import Source
from bench.workloads.triage import Urgent
from bench.workloads.two_kinds import TwoKinds

NAMES = (*WORKLOADS, *RECORDINGS, "triage", "agents", "trace", "two kinds")


def source_of(load: Load, data: Path | None, trace: Path | None = None) -> Source:
    """What a load's requests come from. data: the folder of datasets. trace: a file of your own,
    for the workload "trace". Raises SpecError, WorkloadError."""
    options = dict(load.workload)
    name = options.pop("name", "")
    engine = load.engine_of(Arm(policy="fcfs"))
    try:
        if name in WORKLOADS:
            return Prompts(data, name, **options)
        if name == "two kinds":
            return TwoKinds(**options)
        if name == "trace":
            return MooncakeTrace(_given(trace, name, "--trace"), engine, load.shrink, **options)
        if name == "agents":
            return Agents(_given(data, name, "--data"), engine, **options)
        if name == "triage":
            return Urgent(_given(data, name, "--data"), **options)
        if name in RECORDINGS:
            return Promised(_given(data, name, "--data"), name, **options)
    except TypeError as error:
        raise SpecError(f"load {load.name}: workload {name}: {error}") from error
    raise SpecError(f"load {load.name}: there is no workload {name!r}, known: {', '.join(NAMES)}")


def _given(path: Any, name: str, option: str) -> Path:
    if path is None:
        raise WorkloadError(f"{name} needs recordings: give {option}")
    return Path(path)
