"""Prefill and decode apart on the device clock: arms of an experiment on pairs of servers.

`python -m tests.checks.apart --data DIR [--experiment NAME] [--load LOAD] [--arms ARM ...]
[--seeds N] [--first-seed N] [--speed FACTOR] [--num-requests N] [--record]` asks each pair for the
same requests at the same times, at the rate that the experiment (`apart`, or another whose engines
are) has in the simulator. Of arms only the policy and the engine's fields count. The KV of a prompt
goes to the decode server at the pace of Engine.swap_token_s, one prompt after the other. Records go
to results/apart, with --record to bench/records. Exit code 1 if a run was invalid because the host
held a clock up.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from bench.engines.clock.device import Device
from bench.engines.clock.priority import go_first
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_MODEL,
    PolicyServers,
)
from bench.engines.server.server import Server
from bench.engines.server.side_by_side import Settings, compare_policies
from bench.experiment import records
from bench.experiment.on_servers import record_of
from bench.experiment.records import Provenance, Record
from bench.experiment.run import changed, measured
from bench.experiment.session_servers import SessionServers
from bench.experiment.simulated import Loaded
from bench.experiment.spec import Experiment
from bench.experiment.table import plain
from bench.policies.arm import Arm
from bench.simulator.presets import Engine
from predictor_store.terminal import at_least_one
from tests.checks import mooncake_stand_in
from tests.checks.pair import Pair

_OUTPUT = Path("results/apart")


class _Pairs(PolicyServers):
    """Of each policy two servers, in the place of one."""

    @classmethod
    def of(cls, one: PolicyServers, engine: Engine) -> Self:
        """The same, in pairs."""
        reserved = ("--num-reserved-decode-tokens", str(engine.reserved_decode_tokens))
        given = {each.name: getattr(one, each.name) for each in fields(one)}
        return cls(**given | {"flags": (*one.flags, *reserved)})

    def server(self, policy: str, name: str) -> Any:
        device = self.device
        assert device is not None
        env = mooncake_stand_in.install(
            self.folder / "device_clock", device.engine.swap_token_s / device.speed
        )

        def start(mode: str, flags: Sequence[str]) -> Server:
            this = replace(self, flags=(*self.flags, *flags), env={**self.env, **env})
            return PolicyServers.server(this, policy, f"{name} {mode}")

        return Pair(start)


class _PairsOfLengths(SessionServers):
    """For requests of lengths alone."""

    def _servers(self, arm: Arm) -> PolicyServers:
        return _Pairs.of(super()._servers(arm), self._load.engine_of(arm))


def measure(experiment: Experiment, loaded: Loaded, args: argparse.Namespace) -> int:
    """Every arm, each with all seeds; records are kept as they are made. The exit code."""
    file = records.file_of(experiment.name, records.FOLDER if args.record else _OUTPUT)
    command = shlex.join(["python", "-m", "tests.checks.apart", *sys.argv[1:]])
    made_by, found = replace(Provenance.of_now(), command=command), []
    of_arm = _asked_for_lengths if loaded.source.workload is None else _asked_prompts
    for arm in experiment.arms:
        for record in of_arm(experiment, loaded, arm, args, made_by):
            found.append(record)
            records.write(file, [record])
    print(f"\n{plain(experiment, found)}\n\nrecords: {file}")
    return int(len(found) < len(experiment.arms) * experiment.seeds)


def _asked_prompts(
    experiment: Experiment, loaded: Loaded, arm: Arm, args: argparse.Namespace, made_by: Provenance
) -> Iterator[Record]:
    model = write_model(_OUTPUT / "model", **CPU_MODEL)
    for run in compare_policies(_settings(experiment, loaded, arm, args, model)):
        print(arm.name, run["seed"], run["invalid_reason"], run["device"], flush=True)
        if run["valid"]:
            yield record_of(
                run, (*experiment.columns, *experiment.ratios), made_by,
                experiment=experiment.name, load=loaded.load.name, arm=arm.name, engine="clock",
            )  # fmt: skip


def _asked_for_lengths(
    experiment: Experiment, loaded: Loaded, arm: Arm, args: argparse.Namespace, made_by: Provenance
) -> Iterator[Record]:
    """Raises ServerError where a server fails, or the host is too slow for the clock."""
    columns = (*experiment.columns, *experiment.ratios)
    fewer = replace(loaded.load, num_requests=args.num_requests or loaded.load.num_requests)
    loaded = replace(loaded, load=fewer)
    with closing(_PairsOfLengths(fewer, loaded.source, _OUTPUT / "lengths", args.speed)) as serve:
        first_seed = experiment.first_seed if args.first_seed is None else args.first_seed
        for seed in range(first_seed, first_seed + experiment.seeds):
            served = serve(arm, loaded.requests(arm, seed), seed)
            yield Record(
                experiment=experiment.name, load=loaded.load.name, arm=arm.name, policy=arm.policy,
                seed=seed, engine="clock", made_by=made_by,
                metrics=measured(served, columns, fewer),
            )  # fmt: skip


def _settings(
    experiment: Experiment, loaded: Loaded, arm: Arm, args: argparse.Namespace, model: Path
) -> Settings:
    load, engine, workload = loaded.load, loaded.load.engine_of(arm), loaded.source.workload
    assert workload is not None
    # A server would know the answer to a prompt that comes again.
    most = workload.drawn(len(loaded.arrivals_s(experiment.first_seed)), 0, again=False)
    one = PolicyServers(
        model=model,
        folder=_OUTPUT / arm.name.replace(" ", "-"),
        flags=CPU_ENGINE_FLAGS,
        env=CPU_ENV,
        sage=arm.config,
        device=Device(load.preset, args.speed, engine),
    )
    return Settings(
        workload=workload,
        servers=_Pairs.of(one, engine),
        policies=(arm.policy,),
        rates=(f"{loaded.rate_per_s:.3f}",),
        num_seeds=experiment.seeds,
        first_seed=experiment.first_seed if args.first_seed is None else args.first_seed,
        num_requests=args.num_requests or len(most),
        load=load.arrivals,
        max_new_tokens=load.max_new_tokens,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--experiment", default="apart")
    parser.add_argument("--load", default="1.5x")
    parser.add_argument("--arms", nargs="+", default=["fcfs, 8 kept free", "fcfs", "sage"])
    parser.add_argument("--seeds", type=at_least_one, default=1)
    parser.add_argument("--first-seed", type=int)
    parser.add_argument("--num-requests", type=at_least_one)
    parser.add_argument("--speed", type=float, default=1.0, help="see sage-sched bench")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args(argv)
    go_first()
    experiment = changed(
        Experiment.read(args.experiment),
        engine="clock", seeds=args.seeds, loads=[args.load], arms=args.arms,
    )  # fmt: skip
    return measure(experiment, Loaded(experiment.loads[0], args.data), args)


if __name__ == "__main__":
    sys.exit(main())
