"""Implements `sage-sched bench`, which compares policies on real servers."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.engines.clock.device import device_note
from bench.engines.server.options import configure_servers
from bench.engines.server.server import ServerError
from bench.experiment import records
from bench.experiment.records import METRIC_LISTS, Record
from bench.experiment.report import write_report
from bench.experiment.run import run as run_experiment
from bench.experiment.spec import Experiment, Load, Options
from bench.experiment.stats import headline
from bench.experiment.table import plain
from bench.policies.arm import Arm
from bench.policies.rival import policy_argument
from bench.workloads.arrivals import (
    LOADS,
    PULSE_REQUESTS,
    RECORDED,
    SUSTAINED_SERVICE_TIMES,
    requests_per_s,
)
from bench.workloads.prompt_source import default_workload
from predictor_store.config_file import read_config
from predictor_store.terminal import add_json, at_least_one, print_json

DEFAULT_POLICIES = ("fcfs", "lpm", "hrrn", "shortest-prefill-first", "sage")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", nargs="+", default=DEFAULT_POLICIES, type=policy_argument, metavar="NAME",
        help="values of --schedule-policy, SGLang's own also tuned, as fcfs@conservativeness=0.3 "
        "(see docs/benchmarking.md); ratios are to the first (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rates", nargs="+", default=["0.3x", "2x"], type=_rate, metavar="RATE",
        help="requests/s, or as a multiple of the first policy's capacity (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=at_least_one, default=5, help="default: %(default)s")
    parser.add_argument(
        "--load", choices=(*LOADS, RECORDED), default="pulse",
        help=f"pulse: {PULSE_REQUESTS} Poisson arrivals; sustained: Poisson arrivals for "
        f"{SUSTAINED_SERVICE_TIMES:g} times as long as a request is in service on a full server; "
        "bursts: as a pulse, in crowds; recorded: a stretch of the trace in --data "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--num-requests", type=at_least_one, help="requests of a run (default: those of the load)"
    )
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=2048,
        help="every request's cap; longer answers are cut below it (default: %(default)s)",
    )  # fmt: skip
    configure_servers(parser, Path("results/bench"))
    add_json(parser)


def run(args: argparse.Namespace, server_env: Mapping[str, str] | None = None) -> int:
    """Return 0, or 1 if a run was invalid. Raises UserError if nothing could be compared.

    server_env: the servers' environment, if args.server_flags is given.
    """
    experiment = experiment_of(args)
    found = compare(args, experiment, server_env or {})
    return report(experiment, found, args.output, as_json=args.json)


def experiment_of(args: argparse.Namespace) -> Experiment:
    """Return the experiment that the options of configure describe. Raises ConfigError."""
    sections = read_config(args.sage_config).sections()
    workload = default_workload(args.data, args.workload)
    return Experiment(
        name=args.output.absolute().name,
        title="Policies compared on real servers",
        arms=[Arm(policy=policy, settings=sections) for policy in dict.fromkeys(args.policies)],
        loads=[
            Load(
                name=rate, mix="bench", rate=rate, workload={"name": workload},
                arrivals=args.load, num_requests=args.num_requests,
                max_new_tokens=args.max_new_tokens, capacity_by=args.policies[0],
                **({"preset": args.device_clock} if args.device_clock else {}),
            )
            for rate in args.rates
        ],
        ratios=("mean_e2e_latency_ms", "p99_e2e_latency_ms", "mean_waited_s"),
        columns=METRIC_LISTS["compared"],
        seeds=args.seeds,
        engine="clock" if args.device_clock else "server",
        speed=args.speed,
    )  # fmt: skip


def compare(
    args: argparse.Namespace, experiment: Experiment, server_env: Mapping[str, str]
) -> list[Record]:
    """Run the comparison. Its records are also written to output/records. Raises UserError."""
    # If this process is ended from outside (`timeout`, CI), the servers end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = Options(
        data=args.data, output=args.output.absolute().parent, model=args.model_path,
        server_flags=args.server_flags, server_env=server_env,
    )  # fmt: skip
    file = records.file_of(experiment.name, args.output / "records")
    file.unlink(missing_ok=True)
    return run_experiment(experiment, options, lambda made: records.write(file, [made]))


def report(
    experiment: Experiment,
    found: Sequence[Record],
    folder: Path,
    *,
    as_json: bool = False,
) -> int:
    """Print the table (or the records as JSON), write the report; return the exit status of run.

    Raises ServerError if no run is valid.
    """
    valid = [record for record in found if not record.problem]
    if not valid:
        raise ServerError(f"all runs are invalid, the first because: {found[0].problem}")
    if as_json:
        print_json([asdict(record) for record in found])
    else:
        print(_text(experiment, valid), flush=True)
    write_report(experiment, found, folder / "report.html")
    if not as_json:
        print(f"runs: {folder / 'records'}\nreport: {folder / 'report.html'}")
    if num_invalid := len(found) - len(valid):
        print(f"{num_invalid} of {len(found)} runs are invalid, see the report", file=sys.stderr)
    return 1 if num_invalid else 0


def _text(experiment: Experiment, found: Sequence[Record]) -> str:
    medians = (
        f"Medians over {experiment.seeds} seeds; ratios to {found[0].arm}, paired by\n"
        "seed, with their range."
    )
    note = device_note(found[0].about["settings"])
    lines = [note, medians, plain(experiment, found), headline(found)]
    return "\n" + "\n\n".join(filter(None, lines)) + "\n"


def _rate(text: str) -> str:
    try:
        requests_per_s(text, capacity=1.0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
