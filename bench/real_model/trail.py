"""Probes on the real model's hidden states: `python -m bench.real_model.trail`.

Takes the states that bench.real_model.answers --states kept, adds what the product's predictor said
of each answer before it began, and trains as `sage-sched train-probe` does, which
compares all layers. With --record bench/records/real_model.jsonl gets a line for each recipe: what
was tried, its figures, and where it comes from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.engines.server import facts
from bench.experiment.records import FOLDER
from bench.predictor.candidates import CANDIDATES, DEFAULT
from bench.predictor.replay import foretold
from bench.real_model.answers import CAP, SESSION, Answered, answers_folder, read_answers
from bench.real_model.fetch import MODEL_NAME, fetch
from bench.workloads.prompts import stable_hash
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder
from predictor_store.predict.regression import GeneralLength
from predictor_store.probe.command import table
from predictor_store.probe.file import fingerprint
from predictor_store.probe.recording import ANSWERS, ROWS, Recording, about_recording, row_type
from predictor_store.probe.training import RECIPES, train
from predictor_store.torchvision_schemas import define_missing
from sage_sched.distribution import LengthDistribution

_LOSS = re.compile(r"layer (\d+), epoch \d+ of \d+: held-out loss ([\d.]+) nats")


def told(answers: Sequence[Answered]) -> list[LengthDistribution]:
    """What the predictor says of each, in order of time, having seen those before it."""
    return [
        said[DEFAULT].capped(CAP)
        for group, said in foretold(
            [Observation(a.prompt, a.output_tokens, censored=a.is_cut) for a in answers],
            {DEFAULT: CANDIDATES[DEFAULT]},
            Embedder(DEFAULT_ENCODER),
            general=GeneralLength.shipped(DEFAULT_ENCODER),
            num_first=0,
        )
        for _ in group
    ]


def complete(folder: Path, answers: Sequence[Answered]) -> list[Answered]:
    """Make of the states in the folder a recording as a server leaves it; its answers in order."""
    model = fetch()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layers = [*range(config["num_hidden_layers"])]
    about = {"layers": layers, "hidden_size": config["hidden_size"]}
    about_recording(folder, {**about, "fingerprint": fingerprint(model)})
    mixed = sorted(answers, key=lambda each: each.arrival)
    random.Random(0).shuffle(mixed)
    lines = [
        json.dumps(
            {
                "session": SESSION,
                "arrival": answer.arrival,
                "prompt": f"{stable_hash(answer.prompt):016x}",
                "tokens": answer.output_tokens,
                "is_cut": answer.is_cut,
                "cap": CAP,
                **said.as_fields(),
            }
        )
        for answer, said in zip(mixed, told(mixed), strict=True)
    ]
    (folder / f"{SESSION}-000000{ANSWERS}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    kind = row_type(len(layers), config["hidden_size"])
    size = (folder / f"{SESSION}-000000{ROWS}").stat().st_size
    print(f"{len(lines)} answers, {size // kind.itemsize} rows of {len(layers)} layers", flush=True)
    return mixed


def trained(recording: Recording, recipe: str) -> dict[str, Any]:
    """As `sage-sched train-probe` trains: what it reports, and each layer's held-out loss."""
    lines: list[str] = []
    made = train(recording, RECIPES[recipe], say=lines.append)
    losses: dict[int, float] = {}
    for layer, loss in _LOSS.findall("\n".join(lines)):
        losses[int(layer)] = min(losses.get(int(layer), float("inf")), float(loss))
    reading = made.probe.reading
    print(f"\n**{recipe}**: layer {made.probe.layer}, alpha {reading.alpha:g}, beta {reading.beta}")
    print(table(made.qualities), flush=True)
    return {
        "experiment": "probe",
        "recipe": recipe,
        "num_answers": len(recording.lengths),
        "num_rows": len(recording.ages),
        "layer": made.probe.layer,
        "loss_nats_by_layer": losses,
        "alpha": reading.alpha,
        "beta": reading.beta.tolist(),
        "gamma": reading.gamma,
        "by_age": {
            name: {age: asdict(score) for age, score in quality.items()}
            for name, quality in made.qualities.items()
        },
    }


def record(reports: Sequence[Mapping[str, Any]]) -> None:
    """Add them to the records, each with where it comes from."""
    about = {
        "command": "python -m bench.real_model.trail --record",
        "commit": facts.commit(),
        "model": MODEL_NAME,
        "host": f"{os.cpu_count()} CPU cores, load {os.getloadavg()[2]:.1f}",
    }
    with (FOLDER / "real_model.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**report, **about}) + "\n" for report in reports)


def main() -> int:
    parser = argparse.ArgumentParser(description="Probes on a real model's hidden states.")
    parser.add_argument("--record", action="store_true", help="append to bench/records")
    args = parser.parse_args()
    define_missing()
    folder = answers_folder()
    complete(folder, read_answers())
    recording = Recording.read(folder)
    reports = [trained(recording, recipe) for recipe in ("log", "trail")]
    if args.record:
        record(reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
