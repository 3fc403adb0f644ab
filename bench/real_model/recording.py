"""A recording of hidden states without a server: `python -m bench.real_model.recording`.

Takes the states that bench.real_model.answers --states kept, and adds what the product's predictor
said of each answer before it began, so that `sage-sched train-probe` can read them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.predictor.candidates import CANDIDATES, DEFAULT
from bench.predictor.replay import foretold
from bench.real_model.answers import CAP, SESSION, Answered, answers_folder, read_answers
from bench.real_model.fetch import fetch
from bench.workloads.prompts import stable_hash
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder
from predictor_store.predict.regression import GeneralLength
from predictor_store.probe.file import fingerprint
from predictor_store.probe.recording import ANSWERS, ROWS, about_recording, row_type
from predictor_store.torchvision_schemas import define_missing
from sage_sched.distribution import LengthDistribution


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


def main() -> int:
    define_missing()
    complete(answers_folder(), read_answers())
    print(f"train a probe: sage-sched train-probe {answers_folder()} --out probe.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
