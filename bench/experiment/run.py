"""Runs an experiment: records, one for each load, arm and seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Served
from bench.experiment.records import Provenance, Record, of_metrics
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Arm, Experiment, SpecError
from bench.workloads.source import Purpose

ENGINES = ("sim", "clock", "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a run. data: see bench.workloads.sources. output: for what servers write. model:
    the servers' own, on the engine `server`."""

    data: Path | None = None
    output: Path = Path("results")
    model: Path | None = None
    server_flags: Sequence[str] | None = None


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
        loaded = Loaded(load, options.data)
        arms = list(experiment.arms)
        if experiment.tuned is not None:
            arms.insert(0, best_tuned(experiment, loaded))
        if experiment.engine == "sim" or loaded.source.workload is None:
            yield from _of_requests(experiment, loaded, arms, options.output)
            continue
        from bench.experiment.on_servers import records_of_prompts  # SGLang takes a while

        yield from records_of_prompts(
            experiment, loaded, arms,
            output=options.output, model=options.model, server_flags=options.server_flags,
        )  # fmt: skip


def best_tuned(experiment: Experiment, loaded: Loaded) -> Arm:
    """The best of the experiment's tuning by its mean, on what nothing is reported on."""
    assert experiment.tuned is not None
    means: dict[str, list[float]] = {}
    tried = [*product(experiment.tuned.arms(), experiment.tuned.seeds)]
    for arm, seed in tqdm(tried, desc=f"{loaded.load.name}: tuning", unit="run"):
        result = served(loaded.load, arm, loaded.requests(arm, seed, Purpose.TUNING), seed)
        means.setdefault(arm.policy, []).append(float(result.ttlt_s.mean()))
    return Arm(policy=min(means, key=lambda policy: float(np.mean(means[policy]))))


def _of_requests(
    experiment: Experiment, loaded: Loaded, arms: Sequence[Arm], output: Path
) -> Iterator[Record]:
    """Simulated; or, if they have lengths alone, on real servers on the device clock."""
    load, columns = loaded.load, (*experiment.columns, *experiment.ratios)
    seeds = range(experiment.first_seed, experiment.first_seed + experiment.seeds)
    made_by = Provenance.of_now()
    with contextlib.ExitStack() as stack:
        serve: Callable[[Arm, Sequence[SimRequest], int], Served] = partial(served, load)
        if experiment.engine != "sim":
            from bench.engines.server.session_servers import SessionServers  # SGLang takes a while

            if experiment.engine == "server":
                raise SpecError(f"load {load.name} has no prompts: allowed: --engine sim or clock")
            folder = output / experiment.name
            servers = SessionServers(load, loaded.source, folder, experiment.speed)
            serve = stack.enter_context(contextlib.closing(servers))
        for arm, seed in tqdm([*product(arms, seeds)], desc=load.name, unit="run"):
            found = serve(arm, loaded.requests(arm, seed), seed)
            yield Record(
                experiment=experiment.name,
                load=load.name,
                arm=arm.name,
                policy=arm.policy,
                seed=seed,
                engine=experiment.engine,
                metrics=measured(found, columns),
                made_by=made_by,
            )


def measured(served: Served, columns: Iterable[str]) -> dict[str, float]:
    """What a record of a run keeps. A column is a metric of Served.metrics, or of some classes of
    requests alone: `p99_ttft_ms:LS`, `mean_waited_per_token_ms:1+2`."""
    metrics = {**served.metrics(), **served.session_metrics()}
    attained = served.attainment()
    metrics |= {name: value for name, value in attained.items() if isinstance(value, float | int)}
    by_metric = attained.get("slo_attainment_by_metric", {})
    metrics |= {f"{name}_attainment": share for name, share in by_metric.items()}
    if "tdg_ratio" in metrics:
        metrics["missed_tdg"] = 1 - metrics["tdg_ratio"]
    for column in columns:
        base, _, classes = column.partition(":")
        if classes and set(wanted := classes.split("+")) & set(served.class_names):
            metrics[column] = served.only(wanted).metrics()[base]
    return of_metrics(metrics, columns)


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
