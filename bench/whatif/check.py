"""Does `sage-sched whatif` say what then happens? `python -m bench.whatif.check --data DIR`.

Policies are run on real servers on a device clock. What the first one's run was is written down as
an operator's log, with prompts and without, read as any log is, and simulated under all of them.
Each mean TTLT is held against what the servers then had, and so is which policy is the better one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.calibration.validation import engine_of, read_runs
from bench.engines.clock.device import device_note
from bench.engines.server.server import ServerError
from bench.engines.server.side_by_side import compare_policies
from bench.experiment import compare as command
from bench.experiment.stats import ordered
from bench.whatif.answer import answer_of
from bench.whatif.engine import OwnServer
from bench.whatif.read import read_log
from bench.workloads.named import load_workload
from bench.workloads.prompts import Workload, WorkloadError, sample
from sage_sched.config import SageConfig, StepTimeConfig
from sage_sched.fields import ConfigError

POLICIES = ("fcfs", "fcfs@conservativeness=0.1", "sage")
RATES = ("1.5x", "2x")
# How far a simulated mean may be from the measured one.
WITH_PROMPTS, WITHOUT_PROMPTS = 0.10, 0.15
# Policies whose measured means are closer than this are as good as one another.
_ALIKE = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """One load, and one way to ask. means_s: by policy, measured and simulated."""

    rate: str
    name: str
    allowed: float
    means_s: dict[str, tuple[float, float]]

    def too_far(self) -> list[str]:
        """Policies whose simulated mean is further off than allowed."""
        return [
            policy
            for policy, (measured, simulated) in self.means_s.items()
            if abs(simulated / measured - 1) > self.allowed
        ]

    def misnamed(self) -> list[str]:
        """Pairs of which the worse is taken for the better."""
        found = []
        for one, other in combinations(self.means_s, 2):
            measured, simulated = (self.means_s[one][i] / self.means_s[other][i] for i in range(2))
            if abs(measured - 1) > _ALIKE and (measured > 1) != (simulated > 1):
                found.append(f"{one} / {other} is {measured:.2f}, simulated {simulated:.2f}")
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where it says something else than what happened; 2, with a line on stderr, where nothing
    can be compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="?", metavar="RUNS",
        help="runs.jsonl of such a comparison (default: it is made first)",
    )  # fmt: skip
    command.configure_runs(parser)
    parser.set_defaults(
        policies=POLICIES, rates=RATES, seeds=1, num_requests=240,
        device_clock="h800-80gb-qwen3-32b", speed=4.0, output=Path("results/whatif-check"),
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        if args.runs is None:
            for _ in compare_policies(command.settings_of(args, {})):
                pass
        runs = read_runs(args.runs or args.output / "runs.jsonl")
        workload = load_workload(args.data, args.workload)
        cases = _cases(runs, workload, args.output)
    except (ConfigError, ServerError, WorkloadError, OSError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    print(f"\n{device_note(runs[0]['settings'])}\n\n{table(cases)}\n")
    wrong = [
        f"{case.rate}, {case.name}: {what}"
        for case in cases
        for what in (*(f"{policy} is too far off" for policy in case.too_far()), *case.misnamed())
    ]
    print("\n".join(wrong) or "all within what is allowed, the better policy named each time")
    return 1 if wrong else 0


def _cases(runs: Sequence[dict[str, Any]], workload: Workload, folder: Path) -> list[Case]:
    """Of each load: with prompts, without, and with step times that a server has learned."""
    first = runs[0]["policy"]
    policies = ordered(run["policy"] for run in runs)
    config = SageConfig.parse(runs[0]["settings"]["sage"])
    store = folder / "store" if (folder / "store").is_dir() else None
    cases = []
    for rate, seed in dict.fromkeys((run["rate"], run["seed"]) for run in runs):
        by_policy = {
            run["policy"]: run for run in runs if (run["rate"], run["seed"]) == (rate, seed)
        }
        if first not in by_policy:
            continue
        own = by_policy[first]
        engine = OwnServer(engine_of(own["settings"], None), first, "as the device clock")
        asked = [("with prompts", True, engine, WITH_PROMPTS)]
        asked += [("without prompts", False, engine, WITHOUT_PROMPTS)]
        if (learned := _learned(by_policy.values(), engine)) is not None:
            asked += [("with prompts, learned step times", True, learned, WITH_PROMPTS)]
        for name, has_prompts, server, allowed in asked:
            log = folder / f"log-{rate}-{seed}{'-prompts' if has_prompts else ''}.csv"
            write_log(own, workload, log, has_prompts)
            rows = answer_of(read_log([log]), server, policies, config, store=store).rows
            means_s = {
                row.policy: (by_policy[row.policy]["mean_e2e_latency_ms"] / 1e3, row.mean_ttlt_s)
                for row in rows
                if row.policy in by_policy
            }
            cases.append(Case(rate, name, allowed, means_s))
    return cases


def _learned(runs: Any, server: OwnServer) -> OwnServer | None:
    """With the step times that a server of ours had learned, at its speed."""
    for run in runs:
        told = run["counters"].get("step_time", {})
        if told.get("source") == "learned":
            speed = float(run["settings"].get("speed", 1.0))
            values = {f.name: told[f.name] * speed for f in fields(StepTimeConfig)}
            step_time = StepTimeConfig(**values).step_time()
            return replace(server, engine=replace(server.engine, step_time=step_time))
    return None


def write_log(run: dict[str, Any], workload: Workload, file: Path, has_prompts: bool) -> None:
    """A run as an operator's log. Raises ValueError where it is of another workload."""
    columns = run["requests"]
    chosen = sample(workload.evaluation, len(columns["class"]), run["seed"])
    if columns["class"] != [request.class_name for request in chosen]:
        raise ValueError("the runs are of another workload: give --data as the comparison had")
    names = ["arrival_s", "input_tokens", "output_tokens", "max_new_tokens", "ttlt_s"]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow([*names, "prompt"] if has_prompts else names)
        for i, request in enumerate(chosen):
            row = [
                columns["sent_ms"][i] / 1e3, columns["input_tokens"][i],
                columns["output_tokens"][i], run["settings"]["max_new_tokens"],
                columns["e2e_latency_ms"][i] / 1e3,
            ]  # fmt: skip
            writer.writerow([*row, request.prompt] if has_prompts else row)


def table(cases: Sequence[Case]) -> str:
    """Markdown: mean TTLT of each policy, measured and simulated."""
    lines = ["| load | log | policy | mean TTLT, s | simulated | ratio |", "|---" * 6 + "|"]
    for case in cases:
        for policy, (measured, simulated) in case.means_s.items():
            lines.append(
                f"| {case.rate} | {case.name} | `{policy}` | {measured:.2f} | {simulated:.2f} | "
                f"{simulated / measured:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
