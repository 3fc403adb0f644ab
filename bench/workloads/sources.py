"""The sources that an experiment's workload names."""

from __future__ import annotations

from pathlib import Path

from bench.experiment.spec import Arm, Load, SpecError
from bench.workloads.agents import Agents
from bench.workloads.hidden_states import HiddenStates
from bench.workloads.lengths import RECORDINGS, Promised
from bench.workloads.prompt_source import WORKLOADS, Prompts
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import Source
from bench.workloads.triage import Urgent
from bench.workloads.two_kinds import TwoKinds

NAMES = (*WORKLOADS, *RECORDINGS, "triage", "agents", "two kinds", "hidden states")


def source_of(load: Load, data: Path | None) -> Source:
    """What a load's requests come from; data: the folder of datasets. Raises SpecError,
    WorkloadError."""
    options = dict(load.workload)
    name = options.pop("name", "")
    engine = load.engine_of(Arm(policy="fcfs"))
    try:
        if name in WORKLOADS:
            return Prompts(data, name, **options)
        if name == "two kinds":
            return TwoKinds(**options)
        if name == "hidden states":
            return HiddenStates(**options)
        if name == "agents":
            return Agents(_given(data, name), engine, **options)
        if name == "triage":
            return Urgent(_given(data, name), **options)
        if name in RECORDINGS:
            return Promised(_given(data, name), name, **options)
    except TypeError as error:
        raise SpecError(f"load {load.name}: workload {name}: {error}") from error
    raise SpecError(f"load {load.name}: there is no workload {name!r}, known: {', '.join(NAMES)}")


def _given(data: Path | None, name: str) -> Path:
    if data is None:
        raise WorkloadError(f"{name} needs recordings: give --data")
    return data
