"""The arms of bench.comparison.layer_cuts on real servers: `python -m
bench.comparison.layer_cuts_served`.

A Mixtral of 8 layers and 8 experts with random weights on the device clock of a modelled GPU,
computed in full but for attention, which goes to the newest tokens. Prefills that are cut need a
server without overlap; the other arms have it unless they say so. The policies that only the bench
has (c, Algorithm 1) come to the servers as those of a third party do.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.comparison.layer_cuts import COLUMNS, row
from bench.comparison.qllm_arms import (
    BE_TOKENS,
    FORESEEN,
    LS_SHARE,
    WHOLE_TOKENS,
    Algorithm1,
    Arm,
    ByFirstChunk,
    capacity,
    mixed,
)
from bench.comparison.session_bodies import served
from bench.engines.clock.device import Device
from bench.engines.server import plugins
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV, PolicyServers
from bench.engines.server.server import ServerError
from bench.engines.simulator.presets import PRESETS, Engine
from predictor_store.data.warm import Observation
from sage_sched.best_effort.policy import Qllm, QllmParameters
from sage_sched.config import HintsConfig, SageConfig
from sage_sched.steps.time import attended_pairs

LAYERS, EXPERTS, VOCABULARY = 8, 8, 16_384
# The bench's own, by name.
_POLICIES = {"by-first-chunk": ByFirstChunk, "algorithm-1": Algorithm1}
_UNCHUNKED = ("--chunked-prefill-size", "-1")
_WITHOUT_OVERLAP = "--disable-overlap-schedule"


@dataclass(frozen=True, slots=True)
class ServedArm:
    """arm: as simulated. policy: what the server is started with. slice_ms: of its settings."""

    arm: Arm
    policy: str
    slice_ms: float = 0.0
    overlaps: bool = True

    def flags(self) -> tuple[str, ...]:
        whole = _UNCHUNKED if self.arm.chunk_tokens == WHOLE_TOKENS else ()
        return whole if self.overlaps else (*whole, _WITHOUT_OVERLAP)


def served_arms(engine: Engine) -> list[ServedArm]:
    """Those of layer_cuts that a server can be; d without overlap too, as the simulator has it."""
    spf, chunks = "shortest-prefill-first", (256, 512, 1024)
    # By their times, slices have as many layers of the longest prompt, and more of a shorter one.
    longest = BE_TOKENS[1]
    prefill_s = engine.step_time.prefill_s(1, longest, attended_pairs(0, longest))
    layer_ms = prefill_s * 1e3 / LAYERS
    cut = [
        ServedArm(
            Arm(f"e: cut by {n} layer{'s'[: n > 1]}", Qllm, slices=LAYERS // n),
            "qllm",
            n * layer_ms if n > 1 else 1e-3,  # less than any layer takes
            overlaps=False,
        )
        for n in (1, 2, 4)
    ]
    alone = Arm("e: cut by 1 layer, prompt by prompt", Qllm, slices=LAYERS, prefill_tokens=1)
    return [
        ServedArm(Arm("a: `fcfs`", "fcfs"), "fcfs"),
        ServedArm(Arm("b: `qllm`, whole prefills", Qllm), "qllm"),
        ServedArm(Arm("b: prompt by prompt", Qllm, prefill_tokens=1), "qllm"),
        *(
            ServedArm(Arm(f"c: chunks of {n} that nobody joins", ByFirstChunk, n), "by-first-chunk")
            for n in chunks
        ),
        *(ServedArm(Arm(f"d: chunks of {n}", Qllm, n), "qllm") for n in chunks),
        ServedArm(Arm("d: without overlap, chunks of 512", Qllm, 512), "qllm", overlaps=False),
        *cut,
        ServedArm(alone, "qllm", cut[0].slice_ms, overlaps=False),
        ServedArm(Arm(f"f: `{spf}`, chunks of 512", spf, 512), spf),
        ServedArm(Arm("Algorithm 1 as printed", Algorithm1), "algorithm-1"),
    ]


def introduce(folder: Path) -> None:
    """Make the bench's own policies known here and to the servers that are started from now on. To
    be called before anybody asks which policies there are."""
    for name, policy in _POLICIES.items():
        os.environ |= plugins.install_policy(folder, name, f"{policy.__module__}:{policy.__name__}")
    sys.path.append(str(folder.absolute()))


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
    introduce(args.output / "policies")
    engine, device = PRESETS[args.preset], Device.named(args.preset, args.speed)
    carried = capacity(engine, 600, BE_TOKENS)
    print(f"{args.preset}, {carried:.3g} requests/s, {args.seeds} seeds of {args.num_requests}\n")
    print(f"| load | arm | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for one in served_arms(engine):
        if not one.arm.label.startswith(tuple(args.arms)):
            continue
        with KeptServer(servers_of(one, args.output, engine, device)) as kept:
            for load in args.loads:
                rows = []
                for seed in range(args.seeds):
                    asked = mixed(
                        load * carried,
                        args.num_requests,
                        seed,
                        be_tokens=BE_TOKENS,
                        ls_share=args.ls_share,
                    )
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
    parser.add_argument("--ls-share", type=float, default=LS_SHARE, help="default: %(default)s")
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
