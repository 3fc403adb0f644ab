"""Runs an experiment: records, one for each load, arm and seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.experiment.metrics import measured
from bench.experiment.records import Provenance, Record
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Arm, Experiment, Load, SpecError
from bench.workloads.source import Purpose

ENGINES = ("sim", "clock", "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a run. data, trace: see bench.workloads.sources. output: for what servers write. model:
    the servers' own, on the engine `server`. processes: of simulations."""

    data: Path | None = None
    trace: Path | None = None
    output: Path = Path("results")
    model: Path | None = None
    server_flags: Sequence[str] | None = None
    processes: int = 1


def run(
    experiment: Experiment, options: Options, on_record: Callable[[Record], None]
) -> list[Record]:
    """All records, each also told as it is made. Raises SpecError, WorkloadError, ServerError."""
    found = []
    for record in _records(experiment, options):
        on_record(record)
        found.append(record)
    return found


def _records(experiment: Experiment, options: Options) -> Iterator[Record]:
    for load in experiment.loads:
        loaded = Loaded(load, options.data, options.trace)
        arms = list(experiment.arms)
        if experiment.tuned is not None:
            arms.insert(0, best_tuned(experiment, loaded, options.processes))
        if experiment.engine == "sim":
            yield from _simulated(experiment, loaded, arms, options.processes)
        elif loaded.source.workload is not None:
            from bench.experiment.on_servers import records_of_prompts  # SGLang takes a while

            yield from records_of_prompts(
                experiment, loaded, arms,
                output=options.output, model=options.model, server_flags=options.server_flags,
            )  # fmt: skip
        else:
            yield from _on_clock(experiment, loaded, arms, options)


def best_tuned(experiment: Experiment, loaded: Loaded, processes: int = 1) -> Arm:
    """The best of the experiment's tuning by its mean, on what nothing is reported on."""
    assert experiment.tuned is not None
    jobs = [
        _Job(loaded, arm, seed, Purpose.TUNING, experiment.columns)
        for seed in experiment.tuned.seeds
        for arm in experiment.tuned.arms()
    ]
    means: dict[str, list[float]] = {}
    for job, metrics in _all(jobs, processes, f"{loaded.load.name}: tuning"):
        means.setdefault(job.arm.policy, []).append(metrics["mean_e2e_latency_ms"])
    return Arm(policy=min(means, key=lambda policy: float(np.mean(means[policy]))))


@dataclass(frozen=True, slots=True)
class _Job:
    loaded: Loaded
    arm: Arm
    seed: int
    purpose: Purpose
    columns: Sequence[str]


def _simulated(
    experiment: Experiment, loaded: Loaded, arms: Sequence[Arm], processes: int
) -> Iterator[Record]:
    seeds = range(experiment.first_seed, experiment.first_seed + experiment.seeds)
    columns = (*experiment.columns, *experiment.ratios)
    jobs = [_Job(loaded, arm, seed, Purpose.REPORT, columns) for arm in arms for seed in seeds]
    made_by = Provenance.of_now()
    for job, metrics in _all(jobs, processes, loaded.load.name):
        yield _record(experiment, loaded.load, job.arm, job.seed, metrics, made_by)


def _all(
    jobs: Sequence[_Job], processes: int, label: str
) -> Iterator[tuple[_Job, dict[str, float]]]:
    if jobs:
        # What all need is made before processes are forked.
        jobs[0].loaded.requests(jobs[0].arm, jobs[0].seed, jobs[0].purpose)
    with contextlib.ExitStack() as stack:
        found: Iterator[dict[str, float]] = map(_metrics, jobs)
        if processes > 1:
            _jobs[:] = jobs
            pool = stack.enter_context(get_context("fork").Pool(processes))
            found = pool.imap(_metrics_of, range(len(jobs)))
        yield from zip(jobs, tqdm(found, total=len(jobs), desc=label, unit="run"), strict=True)


_jobs: list[_Job] = []  # what forked processes find


def _metrics_of(number: int) -> dict[str, float]:
    return _metrics(_jobs[number])


def _metrics(job: _Job) -> dict[str, float]:
    requests = job.loaded.requests(job.arm, job.seed, job.purpose)
    return measured(served(job.loaded.load, job.arm, requests, job.seed), job.columns)


def _on_clock(
    experiment: Experiment, loaded: Loaded, arms: Sequence[Arm], options: Options
) -> Iterator[Record]:
    """Requests without text, on real servers on the device clock."""
    from bench.engines.server.session_servers import SessionServers

    if experiment.engine == "server":
        raise SpecError(f"load {loaded.load.name} has no prompts: allowed: --engine sim or clock")
    columns = (*experiment.columns, *experiment.ratios)
    folder, made_by = options.output / experiment.name, Provenance.of_now()
    servers = SessionServers(loaded.load, loaded.source, folder, experiment.speed)
    with contextlib.closing(servers):
        for arm in arms:
            for seed in range(experiment.first_seed, experiment.first_seed + experiment.seeds):
                metrics = measured(servers(arm, loaded.requests(arm, seed)), columns)
                yield _record(experiment, loaded.load, arm, seed, metrics, made_by)


def _record(
    experiment: Experiment,
    load: Load,
    arm: Arm,
    seed: int,
    metrics: dict[str, float],
    made_by: Provenance,
) -> Record:
    return Record(
        experiment=experiment.name,
        load=load.name,
        arm=arm.name,
        policy=arm.policy,
        seed=seed,
        engine=experiment.engine,
        metrics=metrics,
        made_by=made_by,
    )


def changed(
    experiment: Experiment,
    *,
    engine: str | None = None,
    seeds: int | None = None,
    loads: Sequence[str] = (),
    arms: Sequence[str] = (),
) -> Experiment:
    """The experiment with these in the place of its own. Raises SpecError."""
    by_load = {load.name: load for load in experiment.loads}
    by_arm = {arm.name: arm for arm in experiment.arms}
    if unknown := set(loads) - set(by_load):
        raise SpecError(f"loads are {', '.join(by_load)}, not {', '.join(sorted(unknown))}")
    chosen = [by_arm.get(arm) or Arm.parse(arm, "--arms") for arm in arms]
    return replace(
        experiment,
        engine=engine or experiment.engine,
        seeds=seeds or experiment.seeds,
        loads=[by_load[load] for load in loads] or experiment.loads,
        arms=chosen or experiment.arms,
        tuned=None if chosen else experiment.tuned,
    )
