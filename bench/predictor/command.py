"""Implements `sage-sched bench predictor`, which scores predictors on answered prompts, each
predicted before it is learned."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.predictor.answers import MIXED, SETS, observations, shuffled, stream
from bench.predictor.candidates import BLIND, CANDIDATES, THRESHOLD
from bench.predictor.general import held_out, read_sets
from bench.predictor.quality import Quality, quality
from bench.predictor.replay import NUM_FIRST, replay
from predictor_store.data.warm import Observation
from predictor_store.logs.errors import DatasetError
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder
from predictor_store.predict.regression import GeneralLength
from predictor_store.terminal import add_json, at_least_one, field_and_value, print_json
from sage_sched.app.config import ENCODERS

_HEADER = (
    f"| {'predictor':26} | CRPS gain | 95 % | in central 80 % | Spearman |\n|---|---|---|---|---|"
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets", nargs="*", metavar="DATASET", help="answered prompts, as for `sage-sched warm`"
    )
    parser.add_argument(
        "--filter", action="append", default=[], type=field_and_value, metavar="FIELD=VALUE",
        help="take only rows with this value; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="folder with the data sets that bench/predictor/answers.py names",
    )  # fmt: skip
    names = (*SETS, MIXED)
    parser.add_argument(
        "--sets", nargs="+", choices=names, default=names, metavar="NAME",
        help=f"the sets of --data; default: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=at_least_one, metavar="N",
        help="shuffle each set and take its first N answers",
    )  # fmt: skip
    parser.add_argument(
        "--encoder", choices=ENCODERS, default=DEFAULT_ENCODER,
        help="see predictor.encoder; default: %(default)s",
    )  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables. Raises DatasetError if a dataset cannot be read or is too small."""
    embedder = Embedder(args.encoder)
    # The paper's threshold is for MiniLM's cosines.
    candidates = {c: p for c, p in CANDIDATES.items() if c != THRESHOLD or args.encoder == "minilm"}
    numbers: list[dict[str, Any]] = []
    for name, answers, general in _streams(args, embedder):
        if len(answers) <= 2 * NUM_FIRST:
            raise DatasetError(f"{name} has {len(answers)} answers: too few to score predictors")
        found = replay(answers, candidates, embedder, general=general, name=name)
        blind = found[BLIND]
        rows = {c: quality(outcomes, blind) for c, outcomes in found.items()}
        about = {"set": name, "num_answers": len(blind)}
        numbers += [about | {"predictor": c, **asdict(q)} for c, q in rows.items()]
        if not args.json:
            show(name, len(blind), rows)
    if args.json:
        print_json(numbers)
    return 0


def _streams(
    args: argparse.Namespace, embedder: Embedder
) -> Iterator[tuple[str, list[Observation], GeneralLength | None]]:
    """Yield each set's name, its shuffled answers, and a model of general lengths. The model of a
    set in --data is fitted without these answers."""
    if not args.datasets and args.data is None:
        raise DatasetError("name a dataset, or a folder with --data")
    filters = dict(args.filter)
    for dataset in args.datasets:
        answers = shuffled(observations(dataset, filters), 0)[: args.limit]
        yield Path(dataset).name, answers, GeneralLength.shipped(args.encoder)
    if args.data is None:
        return
    sets = read_sets(args.data, embedder).values()
    for name in args.sets:
        answers = stream(args.data, name)[: args.limit]
        yield name, answers, held_out(sets, args.encoder, {answer.prompt for answer in answers})


def show(name: str, number: int, rows: Mapping[str, Quality]) -> None:
    """Print a table of predictors on the set of this name, with the number of judged answers."""
    print(f"\n**{name}**, {number} answers\n\n{_HEADER}")
    for candidate, q in rows.items():
        print(
            f"| {candidate:26} | {q.gain:.3f} | {q.gain_low:.3f} to {q.gain_high:.3f} "
            f"| {q.central_80:.2f} | {q.spearman:.2f} |"
        )
    sys.stdout.flush()
