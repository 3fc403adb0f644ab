"""sage-sched bench run, list and table: experiments that are files."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from bench.engines.server.server import ServerError
from bench.experiment import records
from bench.experiment.records import Record
from bench.experiment.run import ENGINES, Options, changed, run
from bench.experiment.spec import Experiment, SpecError, names
from bench.experiment.table import markdown, plain, stale
from bench.workloads.prompts import WorkloadError
from predictor_store.terminal import add_json, at_least_one, print_json
from sage_sched.fields import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Of `sage-sched bench run`."""
    parser.add_argument(
        "name", metavar="NAME", help="one of `sage-sched bench list`, or a .toml file of your own"
    )
    parser.add_argument("--engine", choices=ENGINES, help="default: the experiment's")
    parser.add_argument("--seeds", type=at_least_one, help="default: the experiment's")
    parser.add_argument("--loads", nargs="+", default=(), metavar="LOAD", help="these alone")
    parser.add_argument(
        "--arms", nargs="+", default=(), metavar="POLICY", help="these in its place"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of datasets")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="for the workload `trace`: requests in Mooncake's format (as aiperf's)",
    )  # fmt: skip
    parser.add_argument("--model-path", type=Path, metavar="DIR", help="of servers")
    parser.add_argument("--server-flags", type=shlex.split, metavar="FLAGS", help="of servers")
    parser.add_argument("--processes", type=at_least_one, default=1, help="of simulations")
    parser.add_argument(
        "--output", type=Path, default=Path("results"), metavar="DIR",
        help="for records and what servers write (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="store_true", help="keep the records in bench/records, for pages"
    )
    add_json(parser)


def run_experiment(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where it cannot be run."""
    folder = records.FOLDER if args.record else args.output / "records"
    try:
        experiment = changed(
            Experiment.read(args.name),
            engine=args.engine, seeds=args.seeds, loads=args.loads, arms=args.arms,
        )  # fmt: skip
        file = records.file_of(experiment.name, folder)
        options = Options(
            data=args.data, trace=args.trace, output=args.output, model=args.model_path,
            server_flags=args.server_flags, processes=args.processes,
        )  # fmt: skip

        def keep(record: Record) -> None:
            records.write(file, [record])

        found = run(experiment, options, keep)
    except (ConfigError, SpecError, ServerError, WorkloadError, ValueError) as error:
        print(f"sage-sched bench run: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json([asdict(record) for record in found])
        return 0
    print(f"\n{experiment.title}\n\n{plain(experiment, found)}\n\nrecords: {file}")
    return 0


def configure_list(parser: argparse.ArgumentParser) -> None:
    """Of `sage-sched bench list`."""
    add_json(parser)


def list_experiments(args: argparse.Namespace) -> int:
    """0."""
    found = {name: Experiment.read(name).title for name in names()}
    if args.json:
        print_json(found)
        return 0
    for name, title in found.items():
        print(f"{name:16}{title}")
    return 0


def configure_table(parser: argparse.ArgumentParser) -> None:
    """Of `sage-sched bench table`."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="print these experiments' tables")
    parser.add_argument(
        "--pages", action="store_true", help="make the tables and pictures in docs again"
    )


def print_tables(args: argparse.Namespace) -> int:
    """0; 2 where there is no such experiment."""
    try:
        for name in args.names:
            print(markdown(Experiment.read(name), records.read(records.file_of(name))))
    except (SpecError, ValueError) as error:
        print(f"sage-sched bench table: {error}", file=sys.stderr)
        return 2
    if args.pages:
        for page, text in stale(sorted(DOCS.glob("*.md"))):
            page.write_text(text, encoding="utf-8")
            tqdm.write(f"{page.name}: tables made again")
        for page, svg in pictures():
            page.write_text(svg, encoding="utf-8")
    return 0


def pictures() -> list[tuple[Path, str]]:
    """The pictures in docs, each with its file: those named `NAME-records.svg`."""
    from bench.experiment.plot import mean_against_tail  # matplotlib takes a second to load

    return [
        (file, mean_against_tail(records.read(records.file_of(file.name.split("-records")[0]))))
        for file in sorted(DOCS.glob("*-records.svg"))
    ]
