"""The product's predictor on the real model's answers: `python -m bench.real_model.prediction`.

Every answer is predicted and then revealed, in an order drawn once. One that was cut at its cap
counts as that long, which is what the server pays for. Appends a record a row to
bench/records/real_model.jsonl with --record.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.predictor.candidates import BLIND, CANDIDATES, DEFAULT, THRESHOLD
from bench.predictor.command import show
from bench.predictor.quality import Outcome, quality
from bench.predictor.replay import replay
from bench.real_model.answers import Answered, read_answers
from bench.real_model.records import append
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder
from predictor_store.predict.regression import GeneralLength

LENGTH_ONLY = "input length"
_SHOWN = (BLIND, LENGTH_ONLY, THRESHOLD, DEFAULT)
# A history of fewer says little; the first hundred are a row of their own.
_NUM_COLD = 100


def streams(answers: Sequence[Answered]) -> dict[str, list[Observation]]:
    """By name, in order of time; those that are repeated are so by Zipf's law."""
    generated = [each for each in answers if not _is_of_dataset(each)]
    groups = {
        "generated prompts, each once": [each for each in generated if each.sample == 0],
        "generated prompts, repeated": generated,
    }
    if len(answers) - len(generated) > _NUM_COLD:
        groups["with prompts of datasets"] = list(answers)
    found = {}
    for name, group in groups.items():
        mixed = sorted(group, key=lambda each: each.arrival)
        random.Random(name).shuffle(mixed)
        found[name] = [
            Observation(each.prompt, each.output_tokens, each.input_tokens) for each in mixed
        ]
    return found


def _is_of_dataset(each: Answered) -> bool:
    return "_" in each.kind


def judge(name: str, answers: Sequence[Observation]) -> list[dict[str, Any]]:
    """Print a table of the stream and return its rows."""
    found = replay(
        answers,
        {candidate: CANDIDATES[candidate] for candidate in _SHOWN},
        Embedder(DEFAULT_ENCODER),
        general=GeneralLength.shipped(DEFAULT_ENCODER),
        num_first=1,
        name=name,
    )
    rows = []
    parts = {"first 100": slice(0, _NUM_COLD), "after 100": slice(_NUM_COLD, None)}
    for part, chosen in parts.items():
        of_part = {candidate: outcomes[chosen] for candidate, outcomes in found.items()}
        rows += _rows(name, part, of_part)
    return rows


def _rows(name: str, part: str, found: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    blind = found[BLIND]
    judged = {candidate: quality(outcomes, blind) for candidate, outcomes in found.items()}
    show(f"{name}, {part}", len(blind), judged)
    about = {"experiment": "prediction", "stream": name, "part": part, "num_answers": len(blind)}
    return [about | {"predictor": c, **asdict(q)} for c, q in judged.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Predictions on a real model's answers.")
    parser.add_argument("--record", action="store_true", help="append to bench/records")
    args = parser.parse_args()
    rows = [
        row for name, answers in streams(read_answers()).items() for row in judge(name, answers)
    ]
    if args.record:
        append(rows, "python -m bench.real_model.prediction --record")
    return 0


if __name__ == "__main__":
    sys.exit(main())
