"""Runs an experiment and makes records, one for each load, arm and seed."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from bench.engines.baseline import Saturation
from bench.experiment.records import Provenance, Record, of_metrics
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import TUNED, Experiment, Load, Options
from bench.policies.arm import Arm
from bench.simulator.pool import OutOfMemoryError
from bench.simulator.result import Result, Served
from bench.workloads.arrivals import QUIET_S, RECORDED, RUSH
from bench.workloads.prompt_source import WORKLOADS
from bench.workloads.source import Purpose
from bench.workloads.sources import check_data
from sage_sched.fields import ConfigError

if TYPE_CHECKING:
    from bench.experiment.servers import Servers

# Runs with generated prompts: the most requests, their cap, and a KV pool that they fill.
_NUM_GENERATED, _GENERATED_CAP, _GENERATED_POOL_TOKENS = 300, 2048, 8192


class Outcome(NamedTuple):
    """The result of an arm and a seed (see Record)."""

    arm: Arm
    seed: int
    metrics: dict[str, float]
    problem: str
    about: Mapping[str, Any]


def run(
    experiment: Experiment,
    options: Options,
    on_record: Callable[[Record], None],
    servers: Callable[..., Any] | None = None,
) -> list[Record]:
    """Return all records, each also given to on_record as it is made.

    servers: a kind of bench.experiment.servers.Servers. Raises ConfigError, WorkloadError,
    ServerError.
    """
    found = []
    for record in _records(experiment, options, servers):
        on_record(record)
        found.append(record)
    return found


def _records(
    experiment: Experiment, options: Options, servers: Callable[..., Any] | None
) -> Iterator[Record]:
    made_by = Provenance.of_now()
    for load in experiment.loads:
        check_data(load.workload, load.arrivals, options.data)
    alike: Loaded | None = None
    best: Arm | None = None
    for load in experiment.loads:
        if alike is None or alike.load.mix != load.mix:
            alike = best = None
        loaded, arms = Loaded(load, options.data, alike), list(experiment.arms)
        if experiment.tuned is not None:
            if best is None or not experiment.tuned.rates:
                best = best_tuned(experiment, loaded, options.jobs)
            arms.insert(0, best)
            if load.capacity_by == TUNED:
                loaded = replace(loaded, load=replace(load, capacity_by=best.policy))
        of_load = replace(experiment, arms=arms, loads=[loaded.load])
        if experiment.engine == "server":
            loaded = replace(loaded, measure=partial(_sustained, of_load, loaded, options))
        alike = loaded
        if experiment.engine == "sim":
            runs, columns = product(arms, experiment.all_seeds), experiment.metrics
            found = _simulated(loaded, runs, columns, Purpose.REPORT, options.jobs)
        else:
            found = _on_servers(of_load, loaded, options, servers)
        for outcome in found:
            yield record_of(experiment, load.name, outcome, made_by)


def record_of(experiment: Experiment, load: str, outcome: Outcome, made_by: Provenance) -> Record:
    """Return the record of an outcome under a load of the experiment."""
    arm, seed, metrics, problem, about = outcome
    return Record(
        experiment=experiment.name, load=load, arm=arm.name, policy=arm.policy, seed=seed,
        engine=experiment.engine, metrics=metrics, made_by=made_by, problem=problem, about=about,
    )  # fmt: skip


def best_tuned(experiment: Experiment, loaded: Loaded, jobs: int = 1) -> Arm:
    """Return the best setting of the experiment's tuning, on requests and seeds that reports do not
    use."""
    tuning = experiment.tuned
    assert tuning is not None
    loads = [loaded]
    if tuning.rates:
        filled = Loaded(replace(loaded.load, capacity_by="fcfs-fill"), loaded.data, loaded)
        loads = [
            replace(filled, load=replace(filled.load, rate=r), alike=filled) for r in tuning.rates
        ]
    sign = -1.0 if tuning.by == "good_share" else 1.0
    found: dict[str, list[float]] = {}
    for at in loads:
        runs = product(tuning.arms(), tuning.seeds)
        for arm, _, metrics, *_ in _simulated(at, runs, [tuning.by], Purpose.TUNING, jobs):
            found.setdefault(arm.policy, []).append(sign * metrics[tuning.by])
    means = {policy: float(np.mean(values)) for policy, values in found.items()}
    # A setting under which a server would end has NaN.
    return Arm(policy=min(means, key=lambda policy: np.nan_to_num(means[policy], nan=np.inf)))


def _simulated(
    loaded: Loaded,
    runs: Iterable[tuple[Arm, int]],
    columns: Sequence[str],
    purpose: Purpose,
    jobs: int,
) -> Iterator[Outcome]:
    """Yield the metrics of each arm and seed as they are ready."""
    _ = loaded.rate_per_s  # computed once, not in each process
    simulate = partial(_simulate, loaded, columns, purpose)
    progress = partial(tqdm, desc=f"{loaded.load.name}: {purpose}", unit="run")
    todo = [*runs]
    if jobs == 1:
        yield from map(simulate, progress(todo))
        return
    global _in_child
    _in_child = simulate  # forked, not pickled: the workload is large
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(_call_in_child, run) for run in todo]
        for future in progress(as_completed(futures), total=len(todo)):
            yield future.result()


_in_child: Callable[[tuple[Arm, int]], Outcome] | None = None


def _call_in_child(run: tuple[Arm, int]) -> Outcome:
    assert _in_child is not None
    return _in_child(run)


def _simulate(
    loaded: Loaded, columns: Sequence[str], purpose: Purpose, run: tuple[Arm, int]
) -> Outcome:
    arm, seed = run
    try:
        result = served(loaded.load, arm, loaded.requests(arm, seed, purpose), seed)
    except OutOfMemoryError:
        if purpose != Purpose.TUNING:
            raise
        return Outcome(arm, seed, dict.fromkeys(columns, math.nan), "", {})
    return Outcome(arm, seed, measured(result, columns, loaded), "", {})


def _on_servers(
    experiment: Experiment,
    loaded: Loaded,
    options: Options,
    servers: Callable[..., Any] | None,
) -> Iterator[Outcome]:
    from bench.experiment.servers import Servers  # SGLang takes a while to load

    in_turn = experiment.engine == "server"
    runs = _in_turn(experiment) if in_turn else product(experiment.arms, experiment.all_seeds)
    with contextlib.closing((servers or Servers)(experiment, loaded, options)) as serve:
        for arm, seed in tqdm([*runs], desc=loaded.load.name, unit="run"):
            yield served_by(serve, experiment, loaded, arm, seed)


def served_by(
    servers: Servers, experiment: Experiment, loaded: Loaded, arm: Arm, seed: int
) -> Outcome:
    """Serve a seed on servers of the arm."""
    ran = servers.run(arm, seed)
    metrics = {}
    if ran.served is not None:
        metrics = measured(ran.served, experiment.metrics, loaded)
        decided = ran.about["counters"].get("decisions", {})
        metrics |= of_metrics(decided, experiment.metrics)
    return Outcome(arm, seed, metrics, ran.problem, ran.about)


def _sustained(experiment: Experiment, loaded: Loaded, options: Options) -> Saturation:
    from bench.experiment.servers import Servers

    with contextlib.closing(Servers(experiment, loaded, options)) as serve:
        return serve.sustained()


def _in_turn(experiment: Experiment) -> Iterator[tuple[Arm, int]]:
    """Yield arms and seeds. Each seed begins with another arm, so that a host that slows down
    favours no arm."""
    arms = experiment.arms
    for seed in experiment.all_seeds:
        first = seed % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            yield arm, seed


def measured(served: Served, columns: Iterable[str], loaded: Loaded) -> dict[str, float]:
    """Return the metrics of a record.

    A column is a metric of Served.metrics, or of some classes of requests alone: `p99_ttft_ms:LS`,
    `mean_waited_per_token_ms:1+2`.
    """
    load = loaded.load
    metrics = {**served.metrics(), **served.session_metrics(), "offered_rate": loaded.rate_per_s}
    is_simulated = isinstance(served, Result)
    if tuple(load.measured) != (0.0, 1.0):
        served = served.arrived_within(*load.measured)
        metrics |= served.metrics()
    if load.arrivals == RUSH:
        served = served.arrived_after(QUIET_S)
        metrics |= served.metrics()
    slo_s = load.ttft_slo_ms / 1e3, load.tpot_slo_ms / 1e3
    metrics["good_share"] = served.good_share(*slo_s)
    came_s = float(served.arrival_s.max() - served.arrival_s.min())
    metrics["good_per_s"] = metrics["good_share"] * len(served.arrival_s) / max(came_s, 1e-9)
    if is_simulated:
        metrics["on_time_share"] = served.on_time_share(load.ttft_slo_ms / 1e3)
    attained = served.attainment()
    metrics |= {name: value for name, value in attained.items() if isinstance(value, float | int)}
    by_metric = attained.get("slo_attainment_by_metric", {})
    metrics |= {f"{name}_attainment": share for name, share in by_metric.items()}
    if "tdg_ratio" in metrics:
        metrics["missed_tdg"] = 1 - metrics["tdg_ratio"]
    for column in columns:
        base, _, classes = column.partition(":")
        if classes and set(wanted := classes.split("+")) & set(served.class_names):
            some = served.only(wanted)
            metrics[column] = (some.metrics() | {"good_share": some.good_share(*slo_s)})[base]
    return of_metrics(metrics, columns)


def changed(
    experiment: Experiment,
    *,
    engine: str | None = None,
    seeds: int | None = None,
    loads: Sequence[str] = (),
    arms: Sequence[str] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
    generated: bool = False,
) -> Experiment:
    """Return the experiment with these fields changed. Raises ConfigError.

    settings: sections of our policies' configuration, for arms that do not set them.
    generated: it becomes small, with generated prompts instead of real ones, under another name.
    """
    if generated:
        experiment = replace(
            experiment,
            name=f"{experiment.name}-generated",
            title=f"{experiment.title}, with few generated prompts",
            loads=[without_data(load) for load in experiment.loads],
            seeds=1,
        )
    by_load = {load.name: load for load in experiment.loads}
    by_arm = {arm.name: arm for arm in experiment.arms}
    if unknown := set(loads) - set(by_load):
        raise ConfigError(f"loads are {', '.join(by_load)}, not {', '.join(sorted(unknown))}")
    needs_tuning = any(load.capacity_by == TUNED for load in experiment.loads)
    chosen = [by_arm.get(arm) or Arm.parse(arm, "--arms") for arm in arms]
    of_arms = [
        replace(arm, settings={**settings, **arm.settings}) for arm in chosen or experiment.arms
    ]
    return replace(
        experiment,
        engine=engine or experiment.engine,
        seeds=seeds or experiment.seeds,
        loads=[by_load[load] for load in loads] or experiment.loads,
        arms=of_arms,
        tuned=None if chosen and not needs_tuning else experiment.tuned,
    )


def without_data(load: Load) -> Load:
    """Return the load with few generated prompts instead of real ones. Raises ConfigError if it has
    none."""
    name = load.workload["name"]
    if name not in WORKLOADS:
        raise ConfigError(f"load {load.name}: {name} needs --data, as it is not made of prompts")
    return replace(
        load,
        workload={"name": "chats"},
        arrivals="pulse" if load.arrivals == RECORDED else load.arrivals,
        num_requests=min(load.num_requests or _NUM_GENERATED, _NUM_GENERATED),
        max_new_tokens=min(load.max_new_tokens, _GENERATED_CAP),
        engine={**load.engine, "kv_pool_tokens": _GENERATED_POOL_TOKENS},
    )
