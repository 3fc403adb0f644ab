"""What hidden states are worth to schedules, in the plan language, on real servers.

    python -m bench.comparison.plan_served --model-path results/plan --probe F --trail-probe F

Servers of the plan language's model on the device clock of an H800, which is to have 16 slots. Each
answer is said again token by token, so that all policies serve the same text, and probes read the
states of a model that says it. All else is as in `sage-sched bench`. With one or several
`runs.jsonl` it makes the table of those.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.calibration.validation import read_runs
from bench.comparison import command
from bench.comparison.stats import ordered, with_interval
from bench.engines.server.server import ServerError
from bench.prediction.plan_recording import CAP_TOKENS, plan_workload
from bench.workloads.prompts import WorkloadError
from sage_sched.fields import ConfigError

POLICIES = ("fcfs", "trail-prompt", "trail", "sage", "sage+")
_COLUMNS = (
    ("mean TTLT, s", "mean_e2e_latency_ms", 1e-3),
    ("p99, s", "p99_e2e_latency_ms", 1e-3),
    ("mean TTFT, s", "mean_ttft_ms", 1e-3),
    ("waited, s", "mean_waited_s", 1.0),
    ("tokens/s", "output_throughput", 1.0),
)
_REFERENCES = ("sage", "trail")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown, a row for each rate and policy: medians over seeds; yields a run; and ratios of
    mean and 99th percentile to each of _REFERENCES, paired by seed, with the sign test's interval.
    """
    names = [name for name, _, _ in _COLUMNS] + ["yields"]
    names += [f"{what} to `{other}`" for other in _REFERENCES for what in ("mean", "p99")]
    lines = ["| rate | policy | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for rate in ordered(run["rate"] for run in runs):
        for policy in ordered(run["policy"] for run in runs):
            found = _by_seed(runs, rate, policy)
            if not found:
                continue
            cells = [
                f"{np.median([run[metric] for run in found.values()]) * scale:.2f}"
                for _, metric, scale in _COLUMNS
            ]
            yields = [
                run["counters"].get("preemption", {}).get("num_yields", 0) for run in found.values()
            ]
            cells.append(f"{np.median(yields):.0f}")
            for other in _REFERENCES:
                others = _by_seed(runs, rate, other)
                cells += [_ratio(found, others, name) for _, name, _ in _COLUMNS[:2]]
            lines.append(f"| {rate} | `{policy}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_seed(runs: Sequence[dict[str, Any]], rate: str, policy: str) -> dict[int, dict[str, Any]]:
    return {run["seed"]: run for run in runs if (run["rate"], run["policy"]) == (rate, policy)}


def _ratio(ours: dict[int, Any], theirs: dict[int, Any], metric: str) -> str:
    ratios = [ours[seed][metric] / theirs[seed][metric] for seed in ours.keys() & theirs.keys()]
    return with_interval(ratios, digits=3) if ratios else ""


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if a run was invalid; 2, with a line on stderr, if nothing could be compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUNS", help="default: made first")
    parser.add_argument("--probe", type=Path, metavar="FILE", help="sage+'s")
    parser.add_argument("--trail-probe", type=Path, metavar="FILE")
    parser.add_argument("--skip", type=int, default=1200, help="answers that were recorded")
    command.configure_runs(parser)
    parser.set_defaults(
        policies=POLICIES, rates=["2x"], device_clock="h800-qwen3-32b", speed=2.0, num_requests=160,
        max_new_tokens=CAP_TOKENS, server_flags=["--max-running-requests", "16"],
        output=Path("results/plan-served"),
    )  # fmt: skip
    args = parser.parse_args(argv)
    status = 0
    try:
        if not args.runs:
            if args.model_path is None or args.probe is None or args.trail_probe is None:
                parser.error("--model-path, --probe and --trail-probe are needed")
            settings = command.settings_of(args, {})
            probes = {"sage+": args.probe, "trail": args.trail_probe}
            settings = replace(
                settings,
                workload=plan_workload(args.model_path, args.skip),
                servers=replace(settings.servers, probes=probes),
            )
            status = command.compare_and_report(settings, args.summary)
        files = args.runs or [args.output / "runs.jsonl"]
        print(table([run for file in files for run in read_runs(file)]))
    except (ConfigError, ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"plan_served: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
