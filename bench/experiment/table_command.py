"""Implements `sage-sched bench table`: shows the results of experiments, in a terminal and in
docs."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from bench.experiment import records
from bench.experiment.table import experiment_named, markdown, stale, within_slo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="print these experiments' tables")
    parser.add_argument(
        "--pages", action="store_true", help="make the tables and pictures in docs again"
    )


def run(args: argparse.Namespace) -> int:
    """Print tables; with --pages also update pages and pictures. Raises ConfigError for an unknown
    experiment or a malformed record."""
    for name in args.names:
        found = records.read(records.file_of(name))
        experiment = experiment_named(name, found)
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
    """Return the pictures in docs, with their new content from records."""
    from bench.experiment.plot import against_load, headline  # matplotlib takes a second to load

    found = records.read(records.file_of("load"))
    return [
        (DOCS / "load-records.svg", against_load(found)),
        (DOCS / "load-headline.svg", headline(found, "own answers")),
    ]
