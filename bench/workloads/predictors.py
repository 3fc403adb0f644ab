"""Predicts many requests at once, from a history that does not grow, for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from bench.workloads.prompts import (
    Workload,
    WorkloadRequest,
)
from predictor_store.predict import predictor
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder
from predictor_store.predict.history import History
from predictor_store.predict.regression import GeneralLength
from predictor_store.predict.static_encoder import TOKENIZER_FILE
from predictor_store.predict.threshold import predict_by_threshold
from predictor_store.store.file import Record
from sage_sched.app.config import PredictorConfig
from sage_sched.distribution import LengthDistribution

_CHUNK = 256
# A prediction that ignores the prompt's words uses this many past requests, the ones with the
# nearest input lengths.
_NUM_ALIKE = 32

Predict = Callable[[WorkloadRequest], LengthDistribution | None]


@dataclass(slots=True)
class Predictors:
    """Predictions of a workload's evaluation requests, before they are served.

    tokenizer: counts input tokens. The vectors and token counts of prompts are cached.
    """

    workload: Workload
    tokenizer: Callable[[str], int]
    # By encoder and prompt.
    _vectors: dict[tuple[str, str], NDArray[np.float32]] = field(default_factory=dict)
    _input_tokens: dict[str, int] = field(default_factory=dict)

    def read(self, requests: Sequence[WorkloadRequest], encoder: str = DEFAULT_ENCODER) -> None:
        """Embed these prompts and the history's, each prompt only once."""
        prompts = [observation.prompt for observation in self.workload.observations()]
        prompts += [request.prompt for request in requests]
        new = [p for p in dict.fromkeys(prompts) if (encoder, p) not in self._vectors]
        if not new:
            return
        vectors = embedded(Embedder(encoder), new)
        for prompt in tqdm(new, desc="embedding", unit="prompt"):
            self._vectors[encoder, prompt] = next(vectors)

    def input_tokens(self, prompt: str) -> int:
        """Return the number of input tokens of a prompt."""
        if prompt not in self._input_tokens:
            self._input_tokens[prompt] = max(1, self.tokenizer(prompt))
        return self._input_tokens[prompt]

    def history(self, encoder: str) -> History:
        """Return the workload's history, all of it warm."""
        observations = self.workload.observations()
        history = History.of_encoder(encoder, len(observations), GeneralLength.shipped(encoder))
        history.load(
            Record(self._vectors[encoder, of.prompt], of.output_tokens, 0, False, "warm")
            for of in observations
        )
        history.fit()
        return history

    def semantic(self, config: PredictorConfig) -> Predict:
        """Return the predictor of a server with this configuration."""
        encoder, threshold = config.encoder, config.threshold
        history = self.history(encoder)

        def predict(request: WorkloadRequest) -> LengthDistribution | None:
            vector = self._vectors[encoder, request.prompt]
            if threshold:
                return predict_by_threshold(history, vector, threshold)
            return predictor.predict(history, vector)

        return predict

    def of_input_length(self) -> Predict:
        """Return a predictor by the history's requests of the nearest input length (SageSched, Fig.
        9)."""
        answered = self.workload.observations()
        known = sorted((self.input_tokens(one.prompt), one.output_tokens) for one in answered)
        inputs = np.array([tokens for tokens, _ in known])
        outputs = np.array([tokens for _, tokens in known])

        def predict(request: WorkloadRequest) -> LengthDistribution:
            near = np.argsort(np.abs(inputs - self.input_tokens(request.prompt)), kind="stable")
            return LengthDistribution.from_samples(outputs[near[:_NUM_ALIKE]], "warm")

        return predict

    def blind(self) -> Predict:
        """Return a predictor that gives every request the distribution of all lengths."""
        lengths = [observation.output_tokens for observation in self.workload.observations()]
        everything = LengthDistribution.from_samples(lengths, "prior")
        everything = everything.compressed(predictor.MAX_ATOMS)
        return lambda request: everything


def embedded(embedder: Embedder, prompts: Sequence[str]) -> Iterator[NDArray[np.float32]]:
    """Return the vector of each prompt, computed in batches."""
    for start in range(0, len(prompts), _CHUNK):
        yield from embedder.embed(prompts[start : start + _CHUNK])


def of_all_records(history: History) -> LengthDistribution | None:
    """Return the distribution of all records, equally weighted."""
    slots = np.arange(len(history))
    return predictor.distribution(history, slots, np.ones(slots.size), "prior")


def token_counter() -> Callable[[str], int]:
    """Return a counter that uses the packaged encoder's vocabulary."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    # Trap: the tokenizer's file cuts and pads each text to 128 tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda prompt: len(tokenizer.encode(prompt).ids)


def truth(request: WorkloadRequest) -> LengthDistribution:
    """Return the true length as the prediction."""
    return LengthDistribution.from_samples([request.output_tokens], "truth")


def changed(
    predict: Predict, change: Callable[[LengthDistribution], LengthDistribution]
) -> Predict:
    """Return a predictor that changes each prediction of another."""

    def other(request: WorkloadRequest) -> LengthDistribution | None:
        found = predict(request)
        return None if found is None else change(found)

    return other


def with_noise(predict: Predict, max_tokens: int) -> Predict:
    """Mix in a uniform distribution, one part to four (SageSched, Fig. 11)."""
    uniform = LengthDistribution.from_samples(np.linspace(1, max_tokens, 64).astype(int), "prior")
    return changed(predict, lambda found: found.mixed(uniform, 0.2))
