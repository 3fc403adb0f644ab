"""Compares the simulator with a real engine: `python -m tests.checks.validate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.engines.clock.device import device_note
from bench.engines.server.server import ServerError
from bench.experiment import compare as command
from bench.experiment import records
from bench.whatif.command import read_step_time
from bench.workloads.prompt_source import load_workload
from bench.workloads.prompts import WorkloadError
from predictor_store.terminal import print_json, speaker
from sage_sched.fields import ConfigError
from tests.checks.validation import misordered, simulate_runs, summarize, table

POLICIES = (
    "fcfs", "fcfs@conservativeness=0.3", "fcfs@conservativeness=0.1", "hrrn",
    "shortest-prefill-first", "uniboost", "ssjf", "trail-prompt", "sage",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    _configure(parser)
    return run(parser.parse_args(argv))


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="?", metavar="RUNS",
        help="records of a comparison (default: the comparison that the other options describe "
        "is made first)",
    )  # fmt: skip
    parser.add_argument(
        "--step-time", metavar="FILE",
        help="what sage-sched bench fit has written, for RUNS that had no device clock",
    )  # fmt: skip
    command.configure(parser)
    parser.set_defaults(
        policies=POLICIES, rates=("1x", "1.5x", "2x"), seeds=3, num_requests=200,
        device_clock="h800-qwen3-32b", speed=4.0, output=Path("results/validate"),
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Return 0; 1 if a run was invalid; 2, with a line on stderr, if nothing can be compared."""
    num_invalid = 0
    try:
        if args.runs is None:
            made = command.compare(args, command.experiment_of(args), {})
            runs = [record for record in made if not record.problem]
            num_invalid = len(made) - len(runs)
        else:
            runs = records.read(args.runs)
        if not runs:
            raise ValueError(f"{args.runs or args.output} has no valid run")
        step_time = read_step_time(args.step_time) if args.step_time else None
        workload = load_workload(args.data, args.workload)
        points = simulate_runs(runs, workload, step_time)
    except (ConfigError, ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"tests.checks.validate: {error}", file=sys.stderr)
        return 2
    note = device_note(runs[0].about["settings"])
    summary, say = summarize(points), speaker(args)
    if args.json:
        print_json(summary)
    say(f"\n{note}\nTTLT, means over seeds, measured and simulated\n{table(points)}")
    for pair in misordered(points):
        say(f"in another order: {pair}")
    args.output.mkdir(parents=True, exist_ok=True)
    summary_file = args.output / "summary.json"
    summary_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(f"\nsummary: {summary_file}")
    if num_invalid:
        print(f"{num_invalid} runs are invalid and left out", file=sys.stderr)
    return 1 if num_invalid else 0


if __name__ == "__main__":
    sys.exit(main())
