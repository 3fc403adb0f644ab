"""An experiment's prompts, asked of real servers: on a device clock, or as fast as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engines.clock.device import Device
from bench.engines.server.options import servers_in
from bench.engines.server.side_by_side import Settings, compare_policies
from bench.experiment.records import Provenance, Record, of_metrics
from bench.experiment.simulated import Loaded
from bench.experiment.spec import Experiment
from bench.policies.arm import Arm, SpecError
from bench.workloads.arrivals import RECORDED


def records_of_prompts(
    experiment: Experiment,
    loaded: Loaded,
    arms: Sequence[Arm],
    *,
    output: Path,
    model: Path | None,
    server_flags: Sequence[str] | None,
) -> Iterator[Record]:
    """Of the runs that are valid. Raises SpecError, ServerError."""
    load, columns = loaded.load, (*experiment.columns, *experiment.ratios)
    of_simulations = load.nodes > 1
    if of_simulations or any(arm != Arm(policy=arm.policy, label=arm.label) for arm in arms):
        raise SpecError(
            f"load {load.name}: servers of prompts differ by policy alone, allowed: --engine sim"
        )
    folder, device = output / experiment.name, None
    if experiment.engine == "clock":
        device = Device(load.preset, experiment.speed, load.engine_of(arms[0]))
    label_of = {arm.policy: arm.name for arm in arms}
    workload = loaded.source.workload
    assert workload is not None
    settings = Settings(
        workload=workload,
        servers=servers_in(folder, arms[0].config, device, model=model, flags=server_flags, env={}),
        policies=tuple(label_of),
        rates=(load.rate,),
        num_seeds=experiment.seeds,
        first_seed=experiment.first_seed,
        num_requests=load.num_requests,
        load="pulse" if load.arrivals == RECORDED else load.arrivals,
        trace=loaded.recording if load.arrivals == RECORDED else None,
        max_new_tokens=load.max_new_tokens,
        ttft_slo_s=load.ttft_slo_ms / 1e3,
        tpot_slo_s=load.tpot_slo_ms / 1e3,
    )
    made_by = Provenance.of_now()
    for found in compare_policies(settings):
        if found["valid"]:
            yield record_of(
                found, columns, made_by, experiment=experiment.name, load=load.name,
                arm=label_of[found["policy"]], engine=experiment.engine,
            )  # fmt: skip


def record_of(
    run: Mapping[str, Any], columns: Sequence[str], made_by: Provenance, **about: str
) -> Record:
    """Of a valid run of a comparison. about: the record's fields, of which arm and load are the
    run's policy and rate unless they are given."""
    given = {"load": run["rate"], "arm": run["policy"], "experiment": "", "engine": "server"}
    return Record(
        **{**given, **about},
        policy=run["policy"],
        seed=run["seed"],
        metrics=of_metrics({**run.get("counters", {}).get("decisions", {}), **run}, columns),
        made_by=made_by,
    )
