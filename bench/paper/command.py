"""sage-sched bench paper: SageSched's evaluation, re-run in the simulator."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.paper.cases import figures
from bench.paper.report import markdown, numbers
from bench.paper.runs import Evaluation, run_all
from bench.workloads.foresight import Foresight, token_counter
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import load_workload
from predictor_store.terminal import add_json, print_json, speaker
from sage_sched.config import PredictorConfig


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="folder of the datasets named in bench/workloads/datasets.py (default: generated "
        "prompts)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--num-requests", type=int, default=900, help="a run; default: %(default)s")
    parser.add_argument("--figures", nargs="+", metavar="NAME", help="such as 7a 10 (default: all)")
    parser.add_argument("--output", type=Path, default=Path("results/paper"), metavar="DIR")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where nothing can be simulated."""
    known = {figure.name: figure for figure in figures()}
    if unknown := set(args.figures or ()) - set(known):
        names = f"{', '.join(sorted(unknown))}, known: {', '.join(known)}"
        print(f"sage-sched bench paper: unknown figures {names}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in args.figures or known]
    try:
        workload = load_workload(args.data)
        foresight = Foresight(workload, PredictorConfig(), token_counter())
        evaluation = Evaluation(foresight, args.num_requests)
        cases = [case for figure in chosen for _, row in figure.rows for case in row]
        evaluation.read(cases, args.seeds)
    except WorkloadError as error:
        print(f"sage-sched bench paper: {error}", file=sys.stderr)
        return 2
    outcomes = run_all(evaluation, cases, args.seeds)
    about = (
        f"{workload.description}. {args.num_requests} requests a run at most, {args.seeds} seeds, "
        "Poisson arrivals; medians over seeds, ratios paired by seed with the interval of the "
        "sign test."
    )
    text = "\n".join([about, "", *(markdown(figure, outcomes) for figure in chosen)])
    say = speaker(args)
    say(text, flush=True)
    if args.json:
        print_json(numbers(chosen, outcomes))
    from bench.paper.page import front, html  # matplotlib takes a second to load

    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.md").write_text(text, encoding="utf-8")
    (args.output / "report.html").write_text(html(chosen, outcomes, about), encoding="utf-8")
    for figure in chosen:
        if figure.is_front:
            (args.output / "front.svg").write_text(front(figure, outcomes), encoding="utf-8")
    say(f"report: {args.output / 'report.html'}")
    return 0
