"""sage-sched bench: policies compared on real servers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engines.clock.device import device_note
from bench.engines.server.options import configure_servers, servers_of
from bench.engines.server.server import ServerError
from bench.engines.server.side_by_side import Settings, compare_policies
from bench.experiment.on_servers import record_of
from bench.experiment.records import METRIC_LISTS, Provenance, Record
from bench.experiment.stats import METRICS, headline, summarize
from bench.experiment.table import as_experiment, plain
from bench.policies.rival import policy_argument
from bench.workloads.arrivals import LOADS, PULSE_REQUESTS, SUSTAINED_SERVICE_TIMES, requests_per_s
from bench.workloads.prompt_source import load_workload
from bench.workloads.prompts import WorkloadError
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
    add_json(parser)


def run(args: argparse.Namespace, server_env: Mapping[str, str] | None = None) -> int:
    """0; 1 where a run was invalid. Raises UserError where nothing could be compared.

    server_env: the servers' environment, where args.server_flags is not left to its default.
    """
    settings = settings_of(args, server_env or {})
    return compare_and_report(settings, args.summary, args.json)


def compare_and_report(settings: Settings, summary_file: Path | None, as_json: bool = False) -> int:
    """Run the comparison, print its table (or its summary as JSON), write summary and report; the
    exit status of run."""
    runs = list(compare_policies(settings))
    num_invalid = sum(not run["valid"] for run in runs)
    if num_invalid == len(runs):
        raise ServerError(f"all runs are invalid, the first because: {runs[0]['invalid_reason']}")
    made_by = Provenance.of_now()
    records = [record_of(run, METRICS, made_by) for run in runs if run["valid"]]
    if summary_file is not None:
        summary_file.parent.mkdir(parents=True, exist_ok=True)
        summary_file.write_text(json.dumps(summarize(records), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(summarize(records))
    else:
        print(_told(settings, runs, records), flush=True)
    report = settings.servers.folder / "report.html"
    from bench.experiment.report import write_report  # matplotlib takes a second to load

    write_report(as_experiment(records, **SHOWN), runs, records, report)
    if not as_json:
        print(f"runs: {settings.servers.folder / 'runs.jsonl'}\nreport: {report}")
    if num_invalid:
        print(f"{num_invalid} of {len(runs)} runs are invalid, see the report", file=sys.stderr)
    return 1 if num_invalid else 0


# How `sage-sched bench` shows a comparison.
SHOWN = {
    "title": "Policies compared on real servers",
    "ratios": ("mean_e2e_latency_ms", "p99_e2e_latency_ms", "mean_waited_s"),
    "columns": METRIC_LISTS["compared"],
}


def _told(settings: Settings, runs: Sequence[dict[str, Any]], records: Sequence[Record]) -> str:
    table = plain(as_experiment(records, **SHOWN), records)
    medians = (
        f"Medians over {settings.num_seeds} seeds; ratios to {settings.policies[0]}, paired by\n"
        "seed, with their range."
    )
    lines = [device_note(runs[0]["settings"]), medians, table, headline(records)]
    return "\n" + "\n\n".join(filter(None, lines)) + "\n"


def settings_of(args: argparse.Namespace, server_env: Mapping[str, str]) -> Settings:
    """By the options of configure. Raises WorkloadError, ConfigError."""
    if args.trace is not None and args.load != "pulse":
        raise WorkloadError(f"--trace has arrival times of its own: not with --load {args.load}")
    return Settings(
        workload=load_workload(args.data, args.workload),
        servers=servers_of(args, server_env),
        policies=tuple(args.policies),
        rates=tuple(args.rates),
        num_seeds=args.seeds,
        num_requests=args.num_requests,
        load=args.load,
        max_new_tokens=args.max_new_tokens,
        trace=args.trace,
    )


def _rate(text: str) -> str:
    try:
        requests_per_s(text, capacity=1.0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
