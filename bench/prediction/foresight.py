"""Predictions for many requests at once, from a history that does not grow: for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.workload.prompts import Workload, WorkloadRequest
from predictor_store import predictor
from predictor_store.embedder import EMBEDDING_DIMENSION, Embedder
from predictor_store.features import NUM_FEATURES
from predictor_store.history import History
from sage_sched.config import PredictorConfig
from sage_sched.distribution import LengthDistribution

_CHUNK = 256
# So many past requests of the nearest input length make a prediction that does not read prompts.
_NUM_ALIKE = 32

Predict = Callable[[WorkloadRequest], LengthDistribution | None]


@dataclass(slots=True)
class Foresight:
    """What is known before a workload's evaluation requests are served.

    tokenizer: counts input tokens. The vectors and token counts of prompts are kept.
    """

    workload: Workload
    config: PredictorConfig
    tokenizer: Callable[[str], int]
    _vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    _input_tokens: dict[str, int] = field(default_factory=dict)

    def read(self, requests: Sequence[WorkloadRequest]) -> None:
        """Embed their prompts and the history's, which takes some 10 ms each; once."""
        prompts = [observation.prompt for observation in self.workload.observations()]
        prompts += [request.prompt for request in requests]
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._vectors]
        if not new:
            return
        embedder = Embedder()
        with tqdm(total=len(new), desc="embedding", unit="prompt") as progress:
            for start in range(0, len(new), _CHUNK):
                chunk = new[start : start + _CHUNK]
                self._vectors.update(zip(chunk, embedder.embed(chunk), strict=True))
                progress.update(len(chunk))

    def input_tokens(self, request: WorkloadRequest) -> int:
        """Tokens of its prompt."""
        if request.prompt not in self._input_tokens:
            self._input_tokens[request.prompt] = max(1, self.tokenizer(request.prompt))
        return self._input_tokens[request.prompt]

    def history(self) -> History:
        """The workload's history, all warm."""
        observations = self.workload.observations()
        history = History(EMBEDDING_DIMENSION, NUM_FEATURES, len(observations))
        for observation in observations:
            vector = self._vectors[observation.prompt]
            history.add(vector, observation.output_tokens, False, "warm")
        history.fit()
        return history

    def semantic(self, config: PredictorConfig | None = None) -> Predict:
        """The predictor that the server runs."""
        history = self.history()
        return lambda request: predictor.predict(
            history, self._vectors[request.prompt], config or self.config
        )

    def of_input_length(self) -> Predict:
        """The history's requests of the most similar input length (SageSched, Fig. 9)."""
        known = sorted(
            (self.input_tokens(WorkloadRequest(o.prompt, o.output_tokens, "")), o.output_tokens)
            for o in self.workload.observations()
        )
        inputs = np.array([tokens for tokens, _ in known])
        outputs = np.array([tokens for _, tokens in known])

        def predict(request: WorkloadRequest) -> LengthDistribution:
            near = np.argsort(np.abs(inputs - self.input_tokens(request)), kind="stable")
            return LengthDistribution.from_samples(outputs[near[:_NUM_ALIKE]], "warm")

        return predict

    def blind(self) -> Predict:
        """The distribution of all lengths."""
        everything = predictor.prior(self.history(), self.config)
        return lambda request: everything


def truth(request: WorkloadRequest) -> LengthDistribution:
    """The length itself."""
    return LengthDistribution.from_samples([request.output_tokens], "truth")


def with_noise(predict: Predict, max_tokens: int, share: float = 0.2) -> Predict:
    """A uniform distribution mixed in, one part to four (SageSched, Fig. 11)."""
    uniform = LengthDistribution.from_samples(np.linspace(1, max_tokens, 64).astype(int), "prior")

    def noisy(request: WorkloadRequest) -> LengthDistribution | None:
        found = predict(request)
        return found if found is None else found.mixed(uniform, share)

    return noisy


def with_factor(predict: Predict, factor: float) -> Predict:
    """All lengths so many times as long."""

    def wrong(request: WorkloadRequest) -> LengthDistribution | None:
        found = predict(request)
        return found if found is None else found.scaled(factor)

    return wrong
