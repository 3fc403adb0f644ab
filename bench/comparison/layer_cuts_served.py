"""The arms of bench.comparison.layer_cuts on real servers: `python -m
bench.comparison.layer_cuts_served`.

A Mixtral of 8 layers and 8 experts with random weights on the device clock of a modelled GPU,
computed in full but for attention, which goes to the newest tokens. Prefills that are cut need a
server without overlap; the other arms have it. What keeps everybody from joining chunks (c) and
Algorithm 1 are simulated alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.comparison.layer_cuts import COLUMNS, row
from bench.comparison.qllm_arms import BE_TOKENS, FORESEEN, WHOLE_TOKENS, Arm, capacity, mixed
from bench.comparison.session_bodies import served
from bench.servers.device import Device
from bench.servers.kept_server import KeptServer
from bench.servers.model import write_model
from bench.servers.policy_server import CPU_ENGINE_FLAGS, CPU_ENV, PolicyServers
from bench.servers.server import ServerError
from bench.simulator.presets import PRESETS, Engine
from predictor_store.warm import Observation
from sage_sched.config import HintsConfig, SageConfig
from sage_sched.policies.qllm import Qllm, QllmParameters

LAYERS, EXPERTS, VOCABULARY = 8, 8, 16_384
# Less than any layer takes: one layer a slice.
_ONE_LAYER_MS = 1e-3
_UNCHUNKED = ("--chunked-prefill-size", "-1")


@dataclass(frozen=True, slots=True)
class ServedArm:
    """arm: as simulated. policy: what the server is started with."""

    arm: Arm
    policy: str
    slice_ms: float = 0.0

    def flags(self) -> tuple[str, ...]:
        whole = _UNCHUNKED if self.arm.chunk_tokens == WHOLE_TOKENS else ()
        return (*whole, "--disable-overlap-schedule") if self.slice_ms else whole


def served_arms() -> list[ServedArm]:
    spf = "shortest-prefill-first"
    return [
        ServedArm(Arm("a: `fcfs`", "fcfs"), "fcfs"),
        ServedArm(Arm("b: `qllm`, whole prefills", Qllm), "qllm"),
        *(ServedArm(Arm(f"d: chunks of {n}", Qllm, n), "qllm") for n in (256, 512, 1024)),
        ServedArm(Arm("e: cut by 1 layer", Qllm, slices=LAYERS), "qllm", _ONE_LAYER_MS),
        ServedArm(Arm(f"f: `{spf}`, chunks of 512", spf, 512), spf),
    ]


def servers_of(one: ServedArm, folder: Path, engine: Engine, device: Device) -> PolicyServers:
    """Servers on the device's clock, to which all answers are foreseen alike."""
    servers = PolicyServers(
        model=write_model(
            folder / "model",
            num_layers=LAYERS,
            hidden_size=64,
            num_heads=2,
            num_kv_heads=1,
            intermediate_size=64,
            num_experts=EXPERTS,
            vocab_size=VOCABULARY,
            context_length=engine.kv_pool_tokens,
        ),
        folder=folder,
        flags=(*CPU_ENGINE_FLAGS, *one.flags()),
        env=CPU_ENV,
        sage=SageConfig(
            hints=HintsConfig(trust="body"),
            policy={"qllm": QllmParameters(slice_ms=one.slice_ms)},
        ),
        device=Device(device.preset, device.speed, one.arm.engine(engine)),
    )
    servers.warm([Observation(f"step {i}", n) for i, n in enumerate(FORESEEN.lengths.tolist())])
    return servers


def compare(args: argparse.Namespace) -> None:
    """A row an arm and load as they come."""
    engine, device = PRESETS[args.preset], Device.named(args.preset, args.speed)
    carried = capacity(engine, 600, BE_TOKENS)
    print(f"{args.preset}, {carried:.3g} requests/s, {args.seeds} seeds of {args.num_requests}\n")
    print(f"| load | arm | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for one in served_arms():
        if not one.arm.label.startswith(tuple(args.arms)):
            continue
        with KeptServer(servers_of(one, args.output, engine, device)) as kept:
            for load in args.loads:
                rows = []
                for seed in range(args.seeds):
                    asked = mixed(load * carried, args.num_requests, seed, be_tokens=BE_TOKENS)
                    times, _ = served(kept, one.policy, asked)
                    first_s = [each.first_token_s for each in times]
                    rows.append(row(asked, first_s, [each.last_token_s for each in times]))
                medians = [float(np.median(column)) for column in zip(*rows, strict=True)]
                numbers = " | ".join(f"{value:.3g}" for value in medians)
                print(f"| {load:g} | {one.arm.label} | {numbers} |", flush=True)


def main(argv: list[str] | None = None) -> int:
    """0; 2, with a line on stderr, if a server fails or the host is too slow for the clock."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="a100-mixtral-8x7b")
    parser.add_argument("--loads", type=float, nargs="+", default=(0.7, 1.2), metavar="SHARE")
    parser.add_argument(
        "--arms", nargs="+", default=[""], metavar="LABEL", help="how theirs begin (default: all)"
    )
    parser.add_argument("--num-requests", type=int, default=120, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--speed", type=float, default=1.0, help="of the clock")
    parser.add_argument("--output", type=Path, default=Path("results/layer_cuts"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        compare(args)
    except ServerError as error:
        print(f"layer_cuts_served: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
