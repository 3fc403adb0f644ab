"""Implements `sage-sched urgency train`, which learns from labelled prompts to guess urgency."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from predictor_store.logs.errors import DatasetError, RowError
from predictor_store.logs.rows import raw_rows
from predictor_store.terminal import add_json, print_json
from predictor_store.urgency.head import NUM_LEVELS, UNDER_COST, fit

# Prompts of this level and of more urgent ones are to be found.
_URGENT = 2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "labels", metavar="LABELS",
        help="rows with prompt, and urgency from 1 (most urgent) to 5, or null for a prompt "
        "without an urgency, which is served as 3",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train and write the model. Raises UserError if the labels are not usable."""
    texts, levels = read_labels(args.labels)
    head, _ = fit(texts, levels, UNDER_COST)
    head.write(args.out)
    if args.json:
        print_json({"confusion": [list(counts) for counts in head.confusion]})
    else:
        print(report(head.confusion))
    return 0


def read_labels(dataset: str) -> tuple[list[str], list[int | None]]:
    """Return prompts and their levels. Raises DatasetError, which names the row."""
    texts: list[str] = []
    levels: list[int | None] = []
    for place, row in raw_rows(dataset):
        if isinstance(row, RowError):
            raise DatasetError(f"{place}: {row}")
        found = row if isinstance(row, dict) else {}
        prompt, level = found.get("prompt"), found.get("urgency", "none")
        is_level = level is None or (type(level) is int and 1 <= level <= NUM_LEVELS)
        if not isinstance(prompt, str) or not is_level:
            allowed = "a prompt, and an urgency of 1 to 5 or null"
            raise DatasetError(f"{place} is {row!r:.100}, allowed: {allowed}")
        texts.append(prompt)
        levels.append(level)
    return texts, levels


def report(confusion: Sequence[Sequence[int]]) -> str:
    """Return a report on the guesses for held-out prompts. confusion: see UrgencyHead."""
    lines = [
        "Guesses for held-out prompts (one fifth at a time), by true level:\n",
        "| level | prompts | guessed 1 | 2 | 3 | 4 | 5 |\n|---|---|---|---|---|---|---|",
    ]
    for name, counts in zip((*range(1, NUM_LEVELS + 1), "none"), confusion, strict=True):
        lines.append(f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    counted = np.array(confusion)
    flagged, num_prompts = counted[:, :_URGENT].sum(axis=1), counted.sum(axis=1)
    if num_urgent := num_prompts[:_URGENT].sum():
        found = flagged[:_URGENT].sum() / num_urgent
        share = flagged[:NUM_LEVELS].sum() / num_prompts[:NUM_LEVELS].sum()
        lines.append(f"\nLevels 1 and 2: {found:.2f} of them found, {share:.2f} of all flagged.")
    if num_prompts[-1]:
        share = flagged[-1] / num_prompts[-1]
        lines.append(f"Of prompts without a level, {share:.3f} are flagged.")
    else:
        lines.append("No row is of no level (null): expect most such prompts to be flagged.")
    return "\n".join(lines)
