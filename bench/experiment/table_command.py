"""sage-sched bench table: the results of experiments, here and in docs."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from bench.experiment import records
from bench.experiment.spec import Experiment
from bench.experiment.table import markdown, stale, within_slo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="print these experiments' tables")
    parser.add_argument(
        "--pages", action="store_true", help="make the tables and pictures in docs again"
    )


def run(args: argparse.Namespace) -> int:
    """Raises SpecError where there is no such experiment, or a record is none."""
    for name in args.names:
        experiment, found = Experiment.read(name), records.read(records.file_of(name))
        print(markdown(experiment, found))
        if experiment.sweeps:
            print(f"\n{within_slo(found)}")
    if args.pages:
        for page, text in stale([ROOT / "README.md", *sorted(DOCS.glob("*.md"))]):
            page.write_text(text, encoding="utf-8")
            tqdm.write(f"{page.name}: tables made again")
        for page, svg in pictures():
            page.write_text(svg, encoding="utf-8")
    return 0


def pictures() -> list[tuple[Path, str]]:
    """The pictures in docs, each with its file: those named `NAME-records.svg`."""
    from bench.experiment.plot import against_load, mean_against_tail  # matplotlib takes a second

    found = []
    for file in sorted(DOCS.glob("*-records.svg")):
        name = file.name.split("-records")[0]
        draw = against_load if Experiment.read(name).sweeps else mean_against_tail
        found.append((file, draw(records.read(records.file_of(name)))))
    return found
