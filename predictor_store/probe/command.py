"""Implements `sage-sched train-probe`, which trains a probe on recorded hidden states."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predictor_store.probe.quality import Quality
from predictor_store.probe.recording import Recording
from predictor_store.terminal import add_json, print_found, speaker


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, metavar="DIR", help="the folder of probe.record")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train a probe, write it and report its quality. Raises RecordingError, or TrainingError if
    the recording is not usable."""
    from predictor_store.probe.training import TrainingError, train

    say = speaker(args)
    if (args.out.parent / "config.json").exists():
        raise TrainingError(
            f"--out is {args.out}, in the folder of a model, where SGLang would take it for "
            "weights; allowed: any other folder"
        )
    recording = Recording.read(args.recording)
    say(f"{len(recording.ages)} rows of {len(recording.lengths)} answers", flush=True)
    trained = train(recording, say=lambda line: say(line, flush=True))
    trained.probe.write(args.out)
    found: dict[str, Any] = {"layer": trained.probe.layer}
    if args.json:
        found["by_age"] = {
            name: {age: asdict(score) for age, score in quality.items()}
            for name, quality in trained.qualities.items()
        }
    print_found(found, args.json)
    say(table(trained.qualities))
    return 0


def table(qualities: dict[str, Quality]) -> str:
    """Return a Markdown table of MAE, CRPS and coverage by age."""
    ages = sorted({age for quality in qualities.values() for age in quality})
    rows = [["MAE · CRPS (tokens) · 80 % interval", *(f"age {age}" for age in ages)]]
    for name, quality in qualities.items():
        scores = [quality.get(age) for age in ages]
        cells = [f"{s.mae:.0f} · {s.crps:.1f} · {s.covered:.0%}" if s else "" for s in scores]
        rows.append([name, *cells])
    head, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * (len(ages) + 1) + "|", *lines])
