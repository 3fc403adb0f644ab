"""sage-sched bench predictor: predictors on answered prompts, in the order of time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.predictor.answers import (
    ALL,
    MIXED,
    SETS,
    SWITCH,
    observations,
    shuffled,
    stream,
)
from bench.predictor.candidates import BLIND, CANDIDATES, DEFAULT, THRESHOLD
from bench.predictor.general import held_out, read_sets
from bench.predictor.quality import Outcome, Quality, quality
from bench.predictor.replay import CAPACITY, NUM_FIRST, replay
from bench.workloads.prompts import WorkloadError
from predictor_store.data.files import DatasetError
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder
from predictor_store.predict.regression import GeneralLength
from predictor_store.terminal import add_json, at_least_one, field_and_value, print_json
from sage_sched.config import ENCODERS

_HEADER = (
    f"| {'predictor':26} | CRPS gain | 95 % | in central 50 % | in central 80 % "
    "| pinball 0.9, tokens | Spearman |\n|---|---|---|---|---|---|---|"
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets", nargs="*", metavar="DATASET", help="as `sage-sched warm` takes them"
    )
    parser.add_argument(
        "--filter", action="append", default=[], type=field_and_value, metavar="FIELD=VALUE",
        help="take only rows with this value; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="folder of the sets named in bench/predictor/answers.py",
    )  # fmt: skip
    names = (*SETS, MIXED, ALL)
    parser.add_argument(
        "--sets", nargs="+", choices=(*names, SWITCH), default=names, metavar="NAME",
        help=f"of --data, or {SWITCH}; default: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--by",
        type=at_least_one,
        metavar="N",
        help="show the default's gain for every N answers too",
    )
    parser.add_argument(
        "--limit",
        type=at_least_one,
        metavar="N",
        help="take the first N answers of each, once shuffled",
    )
    parser.add_argument(
        "--capacity",
        type=at_least_one,
        default=CAPACITY,
        metavar="N",
        help="of the history; default: %(default)s",
    )
    parser.add_argument(
        "--encoder", choices=ENCODERS, default=DEFAULT_ENCODER,
        help="see predictor.encoder; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="the figures as JSON lines")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where a dataset cannot be read or is too small."""
    embedder = Embedder(args.encoder)
    # The paper's threshold is one of MiniLM's cosines.
    candidates = {c: p for c, p in CANDIDATES.items() if c != THRESHOLD or args.encoder == "minilm"}
    numbers: list[dict[str, Any]] = []
    try:
        for name, answers, general in _streams(args, embedder):
            if len(answers) <= 2 * NUM_FIRST:
                raise DatasetError(f"{name} has {len(answers)} answers: too few to tell anything")
            found = replay(
                answers, candidates, embedder,
                general=general, capacity=args.capacity, name=name,
            )  # fmt: skip
            blind = found[BLIND]
            rows = {c: quality(outcomes, blind) for c, outcomes in found.items()}
            numbers += (of_set := _numbers(name, len(blind), rows))
            if not args.json:
                show(name, len(blind), rows)
                for start in range(0, len(blind), args.by) if args.by else ():
                    _show_part(found, slice(start, start + args.by))
            if args.output is not None:
                _append(args.output, of_set)
    except (DatasetError, WorkloadError) as error:
        print(f"sage-sched bench predictor: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(numbers)
    return 0


def _streams(
    args: argparse.Namespace, embedder: Embedder
) -> Iterator[tuple[str, list[Observation], GeneralLength | None]]:
    """Names, answers, and what is known of lengths in general without them."""
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
    """Print a table of predictors on the set of this name, number answers of which were judged."""
    print(f"\n**{name}**, {number} answers\n\n{_HEADER}")
    for candidate, q in rows.items():
        print(
            f"| {candidate:26} | {q.gain:.3f} | {q.gain_low:.3f} to {q.gain_high:.3f} "
            f"| {q.central_50:.2f} | {q.central_80:.2f} | {q.pinball_90:.1f} | {q.spearman:.2f} |"
        )
    sys.stdout.flush()


def _show_part(found: dict[str, list[Outcome]], part: slice) -> None:
    q = quality(found[DEFAULT][part], found[BLIND][part])
    print(
        f"answers {part.start + NUM_FIRST:6} to {part.stop + NUM_FIRST - 1:6}: gain {q.gain:6.3f}"
        f" ({q.gain_low:.3f} to {q.gain_high:.3f}), in central 80 % {q.central_80:.2f}"
    )


def _numbers(name: str, number: int, rows: Mapping[str, Quality]) -> list[dict[str, Any]]:
    return [
        {"set": name, "num_answers": number, "predictor": candidate, **asdict(q)}
        for candidate, q in rows.items()
    ]


def _append(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
