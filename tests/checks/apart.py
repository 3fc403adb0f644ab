"""Runs arms of an experiment on pairs of prefill and decode servers, on the device clock.

`python -m tests.checks.apart --data DIR [--experiment NAME] [--load LOAD] [--arms ARM ...] [--seeds
N] [--first-seed N] [--speed FACTOR] [--num-requests N] [--record]` sends each pair the same
requests at the same times. The rate is the experiment's in the simulator (`apart`, or another with
such engines). Only the policy and the engine's fields of an arm count. The KV of prompts goes to
the decode server at the pace of Engine.swap_token_s, one prompt after another. Records go to
results/apart, with --record to bench/records. Exit code 1 if a run was invalid because the host
delayed a clock.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from bench.engines.clock.priority import go_first
from bench.engines.server.policy_server import PolicyServers
from bench.engines.server.server import Server
from bench.experiment import records
from bench.experiment.records import Record
from bench.experiment.run import changed, run
from bench.experiment.servers import Servers
from bench.experiment.spec import Experiment, Options
from bench.experiment.table import plain
from bench.policies.arm import Arm
from bench.simulator.presets import Engine
from predictor_store.terminal import at_least_one
from tests.checks import mooncake_stand_in
from tests.checks.pair import Pair

_OUTPUT = Path("results/apart")


class _Pairs(PolicyServers):
    """The servers of each policy, in pairs."""

    @classmethod
    def of(cls, one: PolicyServers, engine: Engine) -> Self:
        """Return the same servers in pairs."""
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


class _PairServers(Servers):
    """Serves an arm's requests on a pair."""

    def servers_of(self, arm: Arm) -> PolicyServers:
        return _Pairs.of(super().servers_of(arm), self._load.engine_of(arm))


def measure(experiment: Experiment, args: argparse.Namespace) -> int:
    """Run every arm with all seeds, keep each record as it is made, and return the exit code."""
    file = records.file_of(experiment.name, records.FOLDER if args.record else _OUTPUT)
    command = shlex.join(["python", "-m", "tests.checks.apart", *sys.argv[1:]])

    def keep(made: Record) -> None:
        print(made.arm, made.seed, made.problem, made.about.get("device"), flush=True)
        if not made.problem:
            made_by = replace(made.made_by, command=command)
            about = {} if args.record else made.about
            records.write(file, [replace(made, made_by=made_by, about=about)])

    options = Options(data=args.data, output=_OUTPUT)
    found = run(experiment, options, keep, _PairServers)
    valid = [record for record in found if not record.problem]
    if valid:
        print(f"\n{plain(experiment, valid)}\n\nrecords: {file}")
    return int(len(valid) < len(found))


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
    first_seed = experiment.first_seed if args.first_seed is None else args.first_seed
    loads = [
        replace(load, num_requests=args.num_requests or load.num_requests)
        for load in experiment.loads
    ]
    experiment = replace(experiment, first_seed=first_seed, speed=args.speed, loads=loads)
    return measure(experiment, args)


if __name__ == "__main__":
    sys.exit(main())
