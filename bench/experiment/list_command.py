"""Implements `sage-sched bench list`, which lists the experiments that have files."""

from __future__ import annotations

import argparse

from bench.experiment.spec import Experiment, names
from predictor_store.terminal import add_json, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the experiments and return 0."""
    found = {name: Experiment.read(name).title for name in names()}
    if args.json:
        print_json(found)
        return 0
    for name, title in found.items():
        print(f"{name:16}{title}")
    return 0
