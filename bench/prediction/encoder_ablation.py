"""A fine-tuned encoder against the history's neighbours.

`python -m bench.prediction.encoder_ablation`, after SageSched's Fig. 9. Each set is split by
prompt: the first 60 % to learn from (the encoder's training, the others' history), 10 % to choose
the encoder's epoch by, and 30 % to judge all by.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from bench.prediction.answers import MIXED, SETS, Parts, by_prompt, split, stream
from bench.prediction.candidates import BLIND, CANDIDATES, DEFAULT, THRESHOLD
from bench.prediction.command import show
from bench.prediction.encoder import FineTuning, fine_tune
from bench.prediction.quality import Outcome, quality
from bench.prediction.replay import judged
from bench.workloads.prompts import WorkloadError
from predictor_store.data.dataset_files import DatasetError
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import (
    DEFAULT_ENCODER,
    NUM_BESIDE,
    Embedder,
    embedding_dimension,
)
from predictor_store.predict.history import History
from sage_sched.distribution import LengthDistribution

Predict = Callable[[str], LengthDistribution]
ENCODER = "fine-tuned encoder"
_DEFAULT_SETS = (MIXED, "alpaca_eval", "math_code", "medical", "longdoc")


def from_history(train: Sequence[Observation]) -> dict[str, Predict]:
    """The predictors that need a history, with train as theirs. One thread, as in a server."""

    def predictor(name: str) -> Predict:
        # The paper's threshold is one of MiniLM's cosines.
        encoder = "minilm" if name == THRESHOLD else DEFAULT_ENCODER
        embedder = Embedder(encoder, num_threads=1)
        history = History(embedding_dimension(encoder), NUM_BESIDE, len(train))
        vectors = embedder.embed([answer.prompt for answer in train])
        for answer, vector in zip(train, vectors, strict=True):
            history.add(vector, answer.output_tokens, answer.censored, "history")
        history.fit()

        def predict(prompt: str) -> LengthDistribution:
            found = CANDIDATES[name](history, embedder.embed([prompt])[0])
            assert found is not None  # the history is not empty
            return found

        return predict

    return {name: predictor(name) for name in (BLIND, THRESHOLD, DEFAULT)}


def judge(
    predict: Predict, test: list[Observation], name: str
) -> tuple[list[Outcome], list[float]]:
    """Outcomes, one an answer, and how long each prediction took, ms, one a prompt."""
    rng = np.random.default_rng(0)
    outcomes: list[Outcome] = []
    spent_ms: list[float] = []
    for answers in tqdm(by_prompt(test), desc=name, unit="prompt", mininterval=1):
        started = time.perf_counter()
        predicted = predict(answers[0].prompt)
        spent_ms.append((time.perf_counter() - started) * 1e3)
        outcomes += judged(answers, predicted, rng)
    return outcomes, spent_ms


def measure(name: str, parts: Parts, settings: FineTuning) -> None:
    """Print a table, and what the encoder cost."""
    started = time.process_time()
    encoder, errors = fine_tune(parts.train, parts.validation, settings)
    trained_s = time.process_time() - started
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the others have
    predictors = from_history(parts.train)
    predictors[ENCODER] = lambda prompt: encoder.predict([prompt])[0]
    found = {key: judge(predict, parts.test, key) for key, predict in predictors.items()}
    torch.set_num_threads(num_threads)
    blind = found[BLIND][0]
    show(name, len(blind), {key: quality(each, blind) for key, (each, _) in found.items()})
    saved = quality(found[ENCODER][0], found[DEFAULT][0])
    took_ms = {key: np.median(found[key][1]) for key in (DEFAULT, ENCODER)}
    print(
        f"\nOf the default's CRPS the encoder saves {saved.gain:.3f} ({saved.gain_low:.3f} to "
        f"{saved.gain_high:.3f}). Trained on {len(parts.train)} answers: {trained_s:.0f} s of CPU "
        f"time, epoch {int(np.argmin(errors)) + 1} of {len(errors)}. A prediction, one thread, "
        f"median: {took_ms[DEFAULT]:.1f} ms by the default, {took_ms[ENCODER]:.1f} by the encoder.",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--sets", nargs="+", choices=(*SETS, MIXED), default=_DEFAULT_SETS, metavar="NAME",
        help=f"default: {', '.join(_DEFAULT_SETS)}",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, default=4000, help="answers a set; default: 4000")
    parser.add_argument("--epochs", type=int, default=FineTuning().num_epochs)
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the training")
    args = parser.parse_args()
    try:
        for name in args.sets:
            parts = split(stream(args.data, name, args.seed)[: args.limit])
            measure(name, parts, FineTuning(args.epochs, args.seed))
    except (DatasetError, WorkloadError) as error:
        print(f"encoder_ablation: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
