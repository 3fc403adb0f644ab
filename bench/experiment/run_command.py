"""Implements `sage-sched bench run`, which runs an experiment from a file."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from bench.experiment import goodput, records
from bench.experiment.records import Record
from bench.experiment.run import changed
from bench.experiment.run import run as run_experiment
from bench.experiment.spec import ENGINES, Experiment, Options
from bench.experiment.table import aligned, plain
from predictor_store.terminal import add_json, at_least_one, print_json
from sage_sched.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="one of `sage-sched bench list`, or a .toml file of your own"
    )
    parser.add_argument("--engine", choices=ENGINES, help="default: the experiment's")
    parser.add_argument(
        "--jobs", type=at_least_one, default=1, help="simulations at a time (default: 1)"
    )
    parser.add_argument("--seeds", type=at_least_one, help="default: the experiment's")
    parser.add_argument("--loads", nargs="+", default=(), metavar="LOAD", help="only these loads")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=(),
        metavar="POLICY",
        help="these policies instead of the experiment's",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--data", type=Path, metavar="DIR", help="the folder of datasets")
    prompts.add_argument(
        "--generated",
        action="store_true",
        help="a small run with generated prompts, for a look without data (NAME-generated)",
    )
    parser.add_argument("--model-path", type=Path, metavar="DIR", help="the model of servers")
    parser.add_argument("--server-flags", type=shlex.split, metavar="FLAGS", help="SGLang's flags")
    parser.add_argument(
        "--output", type=Path, default=Path("results"), metavar="DIR",
        help="the folder for records and servers' files (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="store_true", help="keep the records in bench/records, for pages"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if a run was invalid. Raises UserError if it cannot be run."""
    folder = records.FOLDER if args.record else args.output / "records"
    try:
        experiment = changed(
            Experiment.read(args.name),
            engine=args.engine, seeds=args.seeds, loads=args.loads, arms=args.arms,
            generated=args.generated,
        )  # fmt: skip
        file = records.file_of(experiment.name, folder)
        options = Options(
            data=args.data, output=args.output, model=args.model_path,
            server_flags=args.server_flags, jobs=args.jobs,
        )  # fmt: skip
        found = run_experiment(experiment, options, lambda made: _keep(made, file, args.record))
    except ValueError as error:  # an unknown policy, for example
        raise UserError(str(error)) from error
    valid = [record for record in found if not record.problem]
    status = int(len(valid) < len(found))
    if args.json:
        print_json([asdict(record) for record in found])
        return status
    if not valid:
        return status
    print(f"\n{experiment.title}\n\n{plain(experiment, valid)}")
    if experiment.sweeps:
        print(f"\nRequests per second within the SLO\n\n{aligned(*goodput.rows(valid))}")
    print(f"\nrecords: {file}")
    return status


def _keep(made: Record, file: Path, for_pages: bool) -> None:
    """Write a record. Records for pages are written without their requests."""
    if made.problem:
        said = f"invalid: {made.arm}, {made.load}, seed {made.seed}: {made.problem}"
        tqdm.write(said, file=sys.stderr)  # stdout may be JSON
        return
    records.write(file, [replace(made, about={}) if for_pages else made])
