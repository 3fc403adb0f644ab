"""sage-sched bench: policies compared on real servers."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from bench import datasets, synthetic
from bench.arrivals import LOADS, PULSE_REQUESTS, SUSTAINED_SERVICE_TIMES
from bench.compare import Settings, compare, requests_per_s
from bench.device import Device, device_note
from bench.model import write_model
from bench.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_FLAGS,
    CPU_MODEL,
    CPU_SAGE,
    PolicyServers,
)
from bench.priority import go_first
from bench.report import write_report
from bench.rival import Rival
from bench.server import ServerError
from bench.simulator.presets import PRESETS
from bench.stats import headline, summarize, table
from bench.workload import Workload, WorkloadError
from patches.config_file import read_config
from predictor_store.warm_command import at_least_one
from sage_sched.fields import ConfigError

DEFAULT_POLICIES = ("fcfs", "lpm", "hrrn", "shortest-prefill-first", "sage")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", nargs="+", default=DEFAULT_POLICIES, type=_policy, metavar="NAME",
        help="values of --schedule-policy, SGLang's own also tuned, as fcfs@conservativeness=0.3 "
        "(see docs/bench.md); ratios are to the first (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rates", nargs="+", default=["0.3x", "2x"], type=_rate, metavar="RATE",
        help="requests/s, or as a multiple of the first policy's capacity (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=at_least_one, default=5, help="default: %(default)s")
    parser.add_argument(
        "--load", choices=LOADS, default="pulse",
        help=f"pulse: {PULSE_REQUESTS} Poisson arrivals; sustained: Poisson arrivals for "
        f"{SUSTAINED_SERVICE_TIMES:g} times as long as a request is in service on a full server; "
        "bursts: as a pulse, in crowds (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--num-requests", type=at_least_one, help="a run; default: as many as the load has"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help='arrival times instead of a pulse\'s, rows with a field "t" in seconds',
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=2048,
        help="every request's cap; longer answers are cut below it (default: %(default)s)",
    )  # fmt: skip
    configure_servers(parser, Path("results/bench"))
    parser.add_argument("--summary", type=Path, metavar="FILE", help="medians and ratios as JSON")


def configure_servers(parser: argparse.ArgumentParser, output: Path) -> None:
    """The options that name servers and a workload."""
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="folder of the datasets named in bench/datasets.py (default: generated prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--heavy-tailed", action="store_true",
        help="generated prompts with short answers, a tenth of them 20 times longer, which no "
        "prompt tells; not with --data",
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


def run(args: argparse.Namespace, server_env: Mapping[str, str] | None = None) -> int:
    """0; 1 where a run was invalid; 2, with a line on stderr, where nothing could be compared.

    server_env: the servers' environment, where args.server_flags is not left to its default.
    """
    try:
        settings = settings_of(args, server_env or {})
        return compare_and_report(settings, args.summary)
    except (ConfigError, ServerError, WorkloadError) as error:
        print(f"sage-sched bench: {error}", file=sys.stderr)
        return 2


def compare_and_report(settings: Settings, summary_file: Path | None) -> int:
    """Run the comparison, print its table, write summary and report; the exit status of run."""
    runs = list(compare(settings))
    num_invalid = sum(not run["valid"] for run in runs)
    if num_invalid == len(runs):
        raise ServerError(f"all runs are invalid, the first because: {runs[0]['invalid_reason']}")
    summary = summarize(runs)
    if summary_file is not None:
        summary_file.parent.mkdir(parents=True, exist_ok=True)
        summary_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    report = settings.servers.folder / "report.html"
    write_report(runs, summary, report)
    if note := device_note(runs[0]["settings"]):
        print(f"\n{note}")
    print(f"\nMedians over {settings.num_seeds} seeds; ratios to {settings.policies[0]}, paired")
    print(f"by seed, with the interval of the sign test.\n\n{table(summary)}\n")
    if sentence := headline(summary):
        print(f"{sentence}\n")
    print(f"runs: {settings.servers.folder / 'runs.jsonl'}\nreport: {report}")
    if num_invalid:
        print(f"{num_invalid} of {len(runs)} runs are invalid, see the report", file=sys.stderr)
    return 1 if num_invalid else 0


def load_workload(data: Path | None, heavy_tailed: bool = False) -> Workload:
    """From the data folder, or generated. Raises WorkloadError, for both at once too."""
    if data is not None and heavy_tailed:
        raise WorkloadError("--heavy-tailed makes its own prompts: it does not go with --data")
    if data is not None:
        return datasets.load(data)
    make = synthetic.generate_heavy_tailed if heavy_tailed else synthetic.generate
    return make(3000, seed=0)


def settings_of(args: argparse.Namespace, server_env: Mapping[str, str]) -> Settings:
    """By the options of configure. Raises WorkloadError, ConfigError."""
    if args.trace is not None and args.load != "pulse":
        raise WorkloadError(f"--trace has arrival times of its own: not with --load {args.load}")
    return Settings(
        workload=load_workload(args.data, args.heavy_tailed),
        servers=servers_of(args, server_env),
        policies=tuple(args.policies),
        rates=tuple(args.rates),
        num_seeds=args.seeds,
        num_requests=args.num_requests,
        load=args.load,
        max_new_tokens=args.max_new_tokens,
        trace=args.trace,
    )


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
        sage=CPU_SAGE if on_cpu and args.sage_config is None else read_config(args.sage_config),
    )


def device_servers(args: argparse.Namespace) -> PolicyServers:
    """By the same options, on a device clock."""
    go_first()
    device = Device.named(args.device_clock, args.speed)
    given = CPU_SAGE if args.sage_config is None else read_config(args.sage_config)
    return PolicyServers(
        model=args.model_path or write_model(args.output / "model", **CPU_MODEL),
        folder=args.output,
        flags=(*CPU_ENGINE_FLAGS, *(args.server_flags or ())),
        env=CPU_ENV,
        sage=device.settings(given),
        device=device,
    )


def _speed(text: str) -> float:
    factor = float(text)
    if not 0.01 <= factor <= 100:
        raise argparse.ArgumentTypeError(f"the speed is {text!r}, allowed: 0.01 to 100")
    return factor


def _policy(text: str) -> str:
    try:
        Rival.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _rate(text: str) -> str:
    try:
        requests_per_s(text, capacity=1.0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
