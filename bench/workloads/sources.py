"""Finds the source of requests that an experiment's workload names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.simulator.presets import Engine
from bench.workloads.agents import Agents
from bench.workloads.arrivals import RECORDED
from bench.workloads.beside import Beside
from bench.workloads.catalogue import files_of
from bench.workloads.datasets import given
from bench.workloads.lengths import RECORDINGS, WithDeadlines
from bench.workloads.levels import Levels
from bench.workloads.prompt_source import WORKLOADS, Prompts
from bench.workloads.shift import Shift
from bench.workloads.source import Source
from bench.workloads.tenants import Tenants
from bench.workloads.triage import Urgent
from bench.workloads.two_kinds import TwoKinds
from sage_sched.fields import ConfigError

NAMES = (*WORKLOADS, *RECORDINGS, "triage", "agents", "two kinds", "beside")


def check_data(workload: Mapping[str, Any], arrivals: str, data: Path | None) -> None:
    """Raise WorkloadError if the folder of datasets lacks a file of these requests."""
    name = str(workload.get("name", ""))
    if files_of(name, ""):
        given(data, f"the workload {name}", name)
    if arrivals == RECORDED:
        given(data, "the trace of recorded arrivals", "", arrivals)


def source_of(workload: Mapping[str, Any], engine: Engine, data: Path | None) -> Source:
    """Return the source of requests that a workload names. Raises ConfigError, WorkloadError.

    workload: its name and options.
    data: the folder of datasets.
    """
    options = dict(workload)
    name = options.pop("name", "")
    try:
        if name == "levels":
            return Levels(data, **options)
        if name == "beside":
            return Beside(data, **options)
        if name == "shift":
            return Shift(data, **options)
        if name == "tenants":
            return Tenants(data, **options)
        if name in WORKLOADS:
            return Prompts(data, name, **options)
        if name == "two kinds":
            return TwoKinds(**options)
        if name == "agents":
            return Agents(given(data, name, name), engine, **options)
        if name == "triage":
            return Urgent(given(data, name, name), **options)
        if name in RECORDINGS:
            return WithDeadlines(given(data, name, name), name, **options)
    except TypeError as error:
        raise ConfigError(f"workload {name}: {error}") from error
    raise ConfigError(f"there is no workload {name!r}, known: {', '.join(NAMES)}")
