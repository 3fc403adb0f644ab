"""Adds the options of commands that start servers, and makes the servers that they describe."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
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
from bench.simulator.presets import PRESETS
from bench.workloads.prompt_source import WORKLOADS
from predictor_store.config_file import read_config
from sage_sched.app.config import SageConfig


def configure_servers(parser: argparse.ArgumentParser, output: Path) -> None:
    """Add the options that name servers and a workload."""
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="folder of the datasets named in bench/workloads/datasets.py (default: generated "
        "prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--workload", choices=WORKLOADS, default="",
        help="reasoning: math and code with long answers, from --data; heavy-tailed: generated "
        "prompts, a tenth of whose answers are 20 times longer; no prompt shows which "
        "(default: mixed with --data, otherwise generated)",
    )  # fmt: skip
    parser.add_argument(
        "--model-path", type=Path, metavar="DIR", help="default: a small model, written to --output"
    )
    parser.add_argument(
        "--server-flags", type=shlex.split, metavar="FLAGS",
        help="SGLang's flags, the same for every server (default, for CPU hosts: "
        f"{' '.join(CPU_FLAGS)}; with --device-clock: only the flags of the device)",
    )  # fmt: skip
    parser.add_argument(
        "--device-clock", choices=PRESETS, metavar="PRESET",
        help="servers whose steps take as long as on this modelled device, whatever this host's "
        f"speed: {', '.join(PRESETS)}",
    )  # fmt: skip
    parser.add_argument(
        "--speed", type=_speed, default=1.0, metavar="FACTOR",
        help="how many times faster than reality the device clock runs; reports give the times of "
        "reality (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--sage-config", metavar="FILE", help="settings of our policies")
    parser.add_argument(
        "--output", type=Path, default=output, metavar="DIR",
        help="the folder for all files (default: %(default)s)",
    )  # fmt: skip


def servers_of(args: argparse.Namespace, env: Mapping[str, str]) -> PolicyServers:
    """Return the servers that the options of configure_servers describe; see servers_in."""
    device = None
    if args.device_clock is not None:
        device = Device.named(args.device_clock, args.speed)
    sage, flags = read_config(args.sage_config), args.server_flags
    return servers_in(args.output, sage, device, model=args.model_path, flags=flags, env=env)


def servers_in(
    folder: Path,
    sage: SageConfig,
    device: Device | None,
    *,
    model: Path | None,
    flags: Sequence[str] | None,
    env: Mapping[str, str],
) -> PolicyServers:
    """Return the servers of these options.

    folder: for all files that are written.
    model: None for a small one.
    flags: SGLang's; None for CPU_FLAGS.
    env: the servers' environment, if flags are given.
    """
    if device is not None:
        go_first()
        flags = (*CPU_ENGINE_FLAGS, *(flags or ()))
    return PolicyServers(
        model=model or write_model(folder / "model", **CPU_MODEL),
        folder=folder,
        flags=CPU_FLAGS if flags is None else tuple(flags),
        env=CPU_ENV if flags is None or device is not None else env,
        sage=sage,
        device=device,
    )


def _speed(text: str) -> float:
    factor = float(text)
    if not 0.01 <= factor <= 100:
        raise argparse.ArgumentTypeError(f"the speed is {text!r}, allowed: 0.01 to 100")
    return factor
