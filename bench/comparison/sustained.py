"""The README's table and picture: `python -m bench.comparison.sustained [RUNS]`.

Policies at twice what fcfs sustains, for as long as sustained load lasts: SGLang's as they come
and at their best, those of others and ours, on the device clock of an H800 that serves Qwen3-32B.
The best order that there can be, by true lengths, is simulated on the same requests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.calibration.validation import read_runs, simulate_as
from bench.comparison import command
from bench.comparison.plots import mean_against_tail
from bench.comparison.side_by_side import compare_policies
from bench.comparison.stats import METRICS, Summary, summarize
from bench.engines.clock.device import device_note
from bench.engines.server.server import ServerError
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import load_workload
from sage_sched.fields import ConfigError

RATE = "2x"
# SGLang's are tuned as suits them best at this load; `sage-sched bench paper --figures G` has more.
POLICIES = (
    "fcfs", "fcfs@clip=256", "shortest-prefill-first@clip=256", "uniboost", "fcfs-fill",
    "ssjf", "trail-prompt", "sage-order", "sage",
)  # fmt: skip
# What the README calls the order by true lengths.
CLAIRVOYANT = "clairvoyant"
_COLUMNS = (
    ("mean time to last token, s", "mean_e2e_latency_ms", 1e-3),
    ("time waited, s", "mean_waited_s", 1.0),
    ("p99, s", "p99_e2e_latency_ms", 1e-3),
    ("time to first token, s", "mean_ttft_ms", 1e-3),
    ("p99 inter-token latency, ms", "p99_itl_ms", 1.0),
    ("longest gap between two tokens, s", "max_itl_ms", 1e-3),
    ("tokens/s", "arriving_throughput", 1.0),
)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where a run was invalid; 2, with a line on stderr, where there is no table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUNS",
        help="runs.jsonl of such a comparison, in one file or several (default: it is made first)",
    )  # fmt: skip
    command.configure_runs(parser)
    parser.set_defaults(
        policies=POLICIES, rates=[RATE], load="sustained", device_clock="h800-qwen3-32b",
        speed=4.0, output=Path("results/sustained"),
    )  # fmt: skip
    args = parser.parse_args(argv)
    num_invalid = 0
    try:
        if not args.runs:
            made = list(compare_policies(command.settings_of(args, {})))
            num_invalid = sum(not run["valid"] for run in made)
        files = args.runs or [args.output / "runs.jsonl"]
        runs = [run for file in files for run in read_runs(file)]
        runs += _clairvoyant(runs, args)
    except (ConfigError, ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"sustained: {error}", file=sys.stderr)
        return 2
    text = f"{device_note(runs[0]['settings'])}\n\n{markdown(summarize(runs))}"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "table.md").write_text(text, encoding="utf-8")
    (args.output / "sustained.svg").write_text(mean_against_tail(runs), encoding="utf-8")
    print(f"\n{text}")
    if num_invalid:
        print(f"{num_invalid} runs are invalid and left out", file=sys.stderr)
    return 1 if num_invalid else 0


def _clairvoyant(runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The first policy's runs as they would have been by true lengths."""
    workload = load_workload(args.data, args.workload)
    return [
        {
            **dict.fromkeys(METRICS, float("nan")),
            **_named_as_measured(simulate_as("srpt-oracle", run, workload).metrics()),
            **{name: run[name] for name in ("rate", "seed", "valid")},
            "policy": CLAIRVOYANT,
        }
        for run in runs
        if run["policy"] == runs[0]["policy"]
    ]


def _named_as_measured(metrics: dict[str, float]) -> dict[str, float]:
    return {
        **metrics,
        "mean_e2e_latency_ms": 1e3 * metrics["mean_ttlt_s"],
        "p99_e2e_latency_ms": 1e3 * metrics["p99_ttlt_s"],
        "mean_ttft_ms": 1e3 * metrics["mean_ttft_s"],
        "p99_itl_ms": 1e3 * metrics["p99_itl_s"],
        "max_itl_ms": 1e3 * metrics["longest_gap_s"],
    }


def markdown(summary: Summary) -> str:
    """A row a policy: medians over seeds, and the ratio of the means with its interval."""
    first, *_ = summary
    (label, mean, scale), *others = _COLUMNS
    head = ["policy", label, f"ratio to `{first}`", *(label for label, _, _ in others)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for policy, by_rate in summary.items():
        for metrics in by_rate.values():
            ratio = metrics[mean]
            cells = [
                f"`{policy}`" + (", simulated" if policy == CLAIRVOYANT else ""),
                f"{ratio['median'] * scale:.1f}",
                f"{ratio['ratio']:.2f} ({ratio['ratio_low']:.2f} to {ratio['ratio_high']:.2f})",
                *(_short(metrics[name]["median"] * scale) for _, name, scale in others),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
