"""Implements `sage-sched demo`: serves the same requests under SGLang's tuned policies and ours.

It runs on real servers with a modelled GPU's step times (minutes), or in the simulator (a minute).
The prompts come from templates, and the lengths of their answers from a real model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.experiment.lanes import Lane, picture
from bench.experiment.records import Record
from bench.experiment.report import html_table, write_page
from bench.experiment.run import best_tuned
from bench.experiment.run import run as run_experiment
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Experiment, Options
from bench.experiment.stats import against, median, of_arm
from bench.experiment.table import plain
from bench.policies.arm import Arm

OURS = "sage"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate", action="store_true", help="use the simulator: takes a minute, and no server"
    )
    parser.add_argument("--seeds", type=int, help="how many runs of each policy (3)")
    parser.add_argument(
        "--output", type=Path, default=Path("results"), metavar="DIR",
        help="DIR/demo gets report and runs (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if a run was invalid. Raises UserError if nothing could be compared."""
    experiment = Experiment.read("demo")
    loaded = Loaded(experiment.loads[0], None)
    rivals, capacity = _rivals(experiment, loaded)
    experiment = replace(
        experiment,
        arms=[*rivals, *experiment.arms],
        tuned=None,
        engine="sim" if args.simulate else experiment.engine,
        seeds=args.seeds or experiment.seeds,
    )
    print(_plan(experiment, loaded, capacity), flush=True)
    records = run_experiment(experiment, Options(output=args.output), lambda _: None)
    valid = [record for record in records if not record.problem]
    best = _best_of_sglang(experiment, valid)
    experiment = replace(experiment, reference=best.name)
    summary = sentence(valid, experiment.loads[0].name, best.name)
    report = args.output / experiment.name / "report.html"
    shown = (best, Arm(policy=OURS))
    lanes = [_lane(experiment, loaded, arm, valid) for arm in shown]
    write_page(
        report,
        "What scheduling is worth where requests queue",
        [
            f"<p><b>{summary}</b></p>",
            picture([lane for lane in lanes if lane is not None]),
            html_table(experiment, valid),
            f"<p>{_setup(experiment)}</p>",
            f"<p>{_limit(capacity)}</p>",
        ],
    )
    print(f"\n{plain(experiment, valid)}\n\n{_setup(experiment)}\n{_limit(capacity)}")
    print(f"report: {report}\n\n{summary}")
    return int(len(valid) < len(records))


def sentence(valid: Sequence[Record], load: str, best: str) -> str:
    """Return the summary of valid records. best: the arm of SGLang to which ratios refer."""
    arms = of_arm(valid, load, OURS), of_arm(valid, load, best)
    if not all(arms):
        return f"There are no valid runs of {OURS} and {best} to compare."
    ours_s, theirs_s = (median(arm, "mean_e2e_latency_ms") / 1e3 for arm in arms)
    good = [round(100 * median(arm, "good_share")) for arm in arms]
    theirs = f"SGLang's best tuned policy ({best})"
    return (
        f"{against(OURS, ours_s, theirs, theirs_s)}. Of 100 requests {good[0]} were good under "
        f"{OURS}, and {good[1]} under SGLang's: the first token within 2 s, and then at most "
        "100 ms per token."
    )


def _rivals(experiment: Experiment, loaded: Loaded) -> tuple[list[Arm], float]:
    """Tune each of SGLang's policies in the simulator, on other requests. Return the tuned policies
    and the requests per second that the best of them sustains."""
    assert experiment.tuned is not None
    arms = [
        best_tuned(replace(experiment, tuned=replace(experiment.tuned, policies=[policy])), loaded)
        for policy in experiment.tuned.policies
    ]
    load = loaded.load
    sustained = [Loaded(replace(load, capacity_by=arm.policy), None).saturated for arm in arms]
    return arms, max(each.capacity for each in sustained)


def _plan(experiment: Experiment, loaded: Loaded, capacity: float) -> str:
    where = "simulated" if experiment.engine == "sim" else "on real servers: about 7 minutes"
    return (
        f"{len(experiment.arms)} policies x {experiment.seeds} seeds x "
        f"{loaded.load.num_requests} requests, {where}.\n"
        f"SGLang at its best sustains {capacity:.1f} of these requests a second (simulated); "
        f"{loaded.rate_per_s:.1f} a second arrive, so that they queue under any policy.\n"
    )


def _best_of_sglang(experiment: Experiment, valid: Sequence[Record]) -> Arm:
    load = experiment.loads[0].name

    def mean(arm: Arm) -> float:
        value = median(of_arm(valid, load, arm.name), "mean_e2e_latency_ms")
        return float("inf") if value != value else value

    return min((arm for arm in experiment.arms if arm.name != OURS), key=mean)


def _lane(experiment: Experiment, loaded: Loaded, arm: Arm, valid: Sequence[Record]) -> Lane | None:
    """Return the lane of an arm's first valid run; None if there is none."""
    waited_s = median(of_arm(valid, loaded.load.name, arm.name), "mean_waited_s")
    title = f"{arm.name}: requests waited {waited_s:.0f} s on average"
    if experiment.engine == "sim":
        result = served(loaded.load, arm, loaded.requests(arm, experiment.first_seed))
        arrival, first, last = result.arrival_s, result.ttft_s, result.ttlt_s
        pauses = result.pauses_s
    elif runs := of_arm(valid, loaded.load.name, arm.name):
        columns = runs[0].about["requests"]
        names = ("sent_ms", "ttft_ms", "e2e_latency_ms")
        arrival, first, last = (np.array(columns[name], float) / 1e3 for name in names)
        pauses = columns["pauses_s"]
    else:
        return None
    return Lane(title, arrival, arrival + first, arrival + last, pauses, is_ours=arm.name == OURS)


def _setup(experiment: Experiment) -> str:
    load = experiment.loads[0]
    where = (
        "Simulated"
        if experiment.engine == "sim"
        else "Real SGLang servers with a small model, whose steps take as long as on the modelled "
        "GPU (no GPU was measured)"
    )
    return (
        f"{where}: {load.preset} with room for {load.engine['kv_pool_tokens']:,} tokens of KV, "
        f"{load.rate} requests/s. Medians over {experiment.seeds} seeds; ratios are to "
        f"{experiment.reference}, paired by seed. The prompts are generated; the lengths of their "
        "answers are a real model's own (SmolLM2-135M-Instruct, temperature 0.7)."
    )


def _limit(capacity: float) -> str:
    return (
        f"If no request waits, no order can help: below {capacity:.1f} requests/s, which SGLang at "
        "its best sustains here, all of these policies answer about equally fast."
    )
