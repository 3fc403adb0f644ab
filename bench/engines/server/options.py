"""The options of commands that start servers, and the servers that they name."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from bench.engines.clock.device import Device
from bench.engines.clock.priority import go_first
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_FLAGS,
    CPU_MODEL,
    PolicyServers,
)
from bench.engines.simulator.presets import PRESETS
from bench.workloads.named import WORKLOADS
from predictor_store.config_file import read_config


def configure_servers(parser: argparse.ArgumentParser, output: Path) -> None:
    """The options that name servers and a workload."""
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="folder of the datasets named in bench/workloads/datasets.py (default: generated "
        "prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--workload", choices=WORKLOADS, default="mixed",
        help="reasoning: math and code with long answers, from --data; heavy-tailed: generated "
        "prompts with short answers, a tenth of them 20 times longer, which no prompt tells "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--model-path", type=Path, metavar="DIR", help="default: a small one, written to --output"
    )
    parser.add_argument(
        "--server-flags", type=shlex.split, metavar="FLAGS",
        help=f"the same for every server (default, for CPU hosts: {' '.join(CPU_FLAGS)}; with "
        "--device-clock: none but the device's)",
    )  # fmt: skip
    parser.add_argument(
        "--device-clock", choices=PRESETS, metavar="PRESET",
        help="servers whose steps take as long as on this modelled device, whatever this host's "
        f"speed: {', '.join(PRESETS)}",
    )  # fmt: skip
    parser.add_argument(
        "--speed", type=_speed, default=1.0, metavar="FACTOR",
        help="of the device clock: how many times faster than life it goes; times are reported "
        "life-size (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--sage-config", metavar="FILE", help="settings of our policies")
    parser.add_argument(
        "--output", type=Path, default=output, metavar="DIR",
        help="for all that is written (default: %(default)s)",
    )  # fmt: skip


def servers_of(args: argparse.Namespace, env: Mapping[str, str]) -> PolicyServers:
    """By the options of configure_servers; env where args.server_flags is not left alone."""
    if args.device_clock is not None:
        return device_servers(args)
    on_cpu = args.server_flags is None
    return PolicyServers(
        model=args.model_path or write_model(args.output / "model", **CPU_MODEL),
        folder=args.output,
        flags=CPU_FLAGS if on_cpu else tuple(args.server_flags),
        env=CPU_ENV if on_cpu else env,
        sage=read_config(args.sage_config),
    )


def device_servers(args: argparse.Namespace) -> PolicyServers:
    """By the same options, on a device clock."""
    go_first()
    device = Device.named(args.device_clock, args.speed)
    return PolicyServers(
        model=args.model_path or write_model(args.output / "model", **CPU_MODEL),
        folder=args.output,
        flags=(*CPU_ENGINE_FLAGS, *(args.server_flags or ())),
        env=CPU_ENV,
        sage=read_config(args.sage_config),
        device=device,
    )


def _speed(text: str) -> float:
    factor = float(text)
    if not 0.01 <= factor <= 100:
        raise argparse.ArgumentTypeError(f"the speed is {text!r}, allowed: 0.01 to 100")
    return factor
