"""sage-sched bench validate: does the simulator say what the real engine did?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.calibration.validation import (
    Point,
    misordered,
    read_runs,
    read_step_time,
    simulate_runs,
    summarize,
    table,
)
from bench.engines.clock.device import device_note
from bench.engines.server.server import ServerError
from bench.engines.server.side_by_side import compare_policies
from bench.experiment import compare as command
from bench.experiment.stats import ordered
from bench.workloads.named import load_workload
from bench.workloads.prompts import WorkloadError
from predictor_store.terminal import print_json, speaker
from sage_sched.fields import ConfigError

POLICIES = (
    "fcfs", "fcfs@conservativeness=0.3", "fcfs@conservativeness=0.1", "hrrn",
    "shortest-prefill-first", "uniboost", "ssjf", "trail-prompt", "sage-order", "sage",
)  # fmt: skip
RATES = ("1x", "1.5x", "2x")
NUM_SEEDS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="?", metavar="RUNS",
        help="runs.jsonl of a comparison (default: the comparison that the other options describe "
        "is made first)",
    )  # fmt: skip
    parser.add_argument(
        "--step-time", metavar="FILE",
        help="what sage-sched bench fit has written, for RUNS that had no device clock",
    )  # fmt: skip
    command.configure(parser)
    parser.set_defaults(
        policies=POLICIES, rates=RATES, seeds=NUM_SEEDS, num_requests=200,
        device_clock="h800-qwen3-32b", speed=4.0, output=Path("results/validate"),
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """0; 1 where a run was invalid; 2, with a line on stderr, where nothing can be compared."""
    num_invalid = 0
    file = args.output / "runs.jsonl" if args.runs is None else args.runs
    try:
        if args.runs is None:
            num_invalid = sum(
                not run["valid"] for run in compare_policies(command.settings_of(args, {}))
            )
        runs = read_runs(file)
        step_time = read_step_time(args.step_time) if args.step_time else None
        workload = load_workload(args.data, args.workload)
        points = simulate_runs(runs, workload, step_time)
    except (ConfigError, ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"sage-sched bench validate: {error}", file=sys.stderr)
        return 2
    note = device_note(runs[0]["settings"])
    summary, say = summarize(points), speaker(args)
    if args.json:
        print_json(summary)
    say(f"\n{note}\nTTLT, means over seeds, measured and simulated\n{table(points)}")
    for pair in misordered(points):
        say(f"in another order: {pair}")
    args.output.mkdir(parents=True, exist_ok=True)
    summary_file = args.summary or args.output / "summary.json"
    summary_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot(points, note, args.output / "validate.svg")
    say(f"\nsummary: {summary_file}\nplot: {args.output / 'validate.svg'}")
    if num_invalid:
        print(f"{num_invalid} runs are invalid and left out, see {file}", file=sys.stderr)
    return 1 if num_invalid else 0


def plot(points: Sequence[Point], note: str, file: Path) -> None:
    """Simulated against measured mean TTLT, a point a run, with the band of 3 %."""
    import matplotlib.pyplot as plt  # it takes a second to load

    from bench.experiment.plot import STYLE, colors

    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6, 5.4), layout="constrained")
        for policy, color in colors(ordered(point.policy for point in points)).items():
            mine = [point for point in points if point.policy == policy]
            measured_s = [point.measured_s[0] for point in mine]
            simulated_s = [point.simulated_s[0] for point in mine]
            axis.scatter(measured_s, simulated_s, s=18, color=color, label=policy)
        both_s = [s for point in points for s in (point.measured_s[0], point.simulated_s[0])]
        ends = np.array([0.9 * min(both_s), 1.1 * max(both_s)])
        axis.plot(ends, ends, color="#444", lw=1)
        axis.fill_between(ends, ends * 0.97, ends * 1.03, color="#444", alpha=0.1, lw=0)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("mean TTLT on the engine, s (log)")
        axis.set_ylabel("mean TTLT in the simulator, s (log)")
        axis.set_title(note, fontsize=8)
        axis.legend(fontsize=8)
        figure.savefig(file)
        plt.close(figure)
