"""Implements `sage-sched bench run`, which runs an experiment from a file."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.engines.clock.device import device_note
from bench.experiment import goodput, records
from bench.experiment.records import Record
from bench.experiment.report import write_report
from bench.experiment.run import changed
from bench.experiment.run import run as run_experiment
from bench.experiment.spec import ENGINES, Experiment, Options
from bench.experiment.stats import headline
from bench.experiment.table import aligned, plain
from predictor_store.config_file import read_config
from predictor_store.terminal import add_json, at_least_one, field_and_value, print_json
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
    parser.add_argument(
        "--set", nargs="+", default=(), type=_key_and_value, metavar="KEY=VALUE",
        help="these keys of the experiment and of all its loads, as in its file, such as "
        "num_requests=40 'rates=[\"1x\", \"2x\"]' (docs/benchmarking.md)",
    )  # fmt: skip
    parser.add_argument(
        "--sage-config", metavar="FILE", help="settings of our policies, where arms do not set them"
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
    # If this process is ended from outside (`timeout`, CI), its servers end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = records.FOLDER if args.record else args.output / "records"
    try:
        experiment = changed(
            Experiment.read(args.name, dict(args.set)),
            engine=args.engine, seeds=args.seeds, loads=args.loads, arms=args.arms,
            settings=read_config(args.sage_config).sections() if args.sage_config else {},
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
    if experiment.engine != "sim":
        report = args.output / experiment.name / "report.html"
        write_report(experiment, found, report)
        print(f"\n{device_note(valid[0].about['settings'])}\n{headline(valid)}\nreport: {report}")
    print(f"\nrecords: {file}")
    return status


def _key_and_value(text: str) -> tuple[str, Any]:
    """Parse an option KEY=VALUE. A value that is none in TOML is a text."""
    key, value = field_and_value(text)
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _keep(made: Record, file: Path, for_pages: bool) -> None:
    """Write a record. Records for pages are written without their requests."""
    if made.problem:
        said = f"invalid: {made.arm}, {made.load}, seed {made.seed}: {made.problem}"
        tqdm.write(said, file=sys.stderr)  # stdout may be JSON
        return
    records.write(file, [replace(made, about={}) if for_pages else made])
