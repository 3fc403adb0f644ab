"""Replays a server's predictor on a log's prompts, in the order of time."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.whatif.log import Logged
from bench.workloads.predictors import embedded
from predictor_store.predict import predictor
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.predict.features import excerpt
from predictor_store.predict.history import History
from predictor_store.predict.quality import Forecast, RollingQuality
from predictor_store.predict.regression import GeneralLength
from predictor_store.store.file import Record, StoreError
from predictor_store.store.store import Store, folder_of, has_store
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution


class ReplayedPredictor:
    """A predictor that begins with a store, or with the shipped knowledge only, and learns each
    answer when it ends.

    A log lacks sessions and other hints, so they are not used.

    quality: of the predictions so far, as in /server_info.
    """

    def __init__(self, config: SageConfig, store: Path | None) -> None:
        """store: the folder of a store, which is not changed. Raises StoreError."""
        self._config = config.predictor
        encoder = config.predictor.encoder
        self._history = History.of_encoder(
            encoder, config.store.capacity, GeneralLength.shipped(encoder)
        )
        if store is not None:
            kept = replace(config.store, path=str(store), on_disk=False)
            if not has_store(folder_of(kept)):
                raise StoreError(f"there is no store in {store}")
            with contextlib.closing(Store(kept, fingerprint(encoder), dimension(encoder))) as read:
                self._history.load(read.load())
        self._history.fit()
        self._prior = predictor.prior(self._history)
        self._num_new = 0
        self._quality = RollingQuality()

    def quality(self) -> dict[str, Any]:
        return self._quality.summary()

    def predictions(
        self, requests: Sequence[Logged], ends_s: Sequence[float]
    ) -> list[LengthDistribution | None]:
        """Return the predictions of requests in order of arrival; None for requests without a
        prompt.

        ends_s: when each ends, on the same clock.
        """
        said: list[LengthDistribution | None] = []
        running: list[tuple[float, int, NDArray[np.float32], Forecast]] = []
        vectors = self._vectors(requests)
        bar = tqdm(requests, desc="predicting", unit="prompt", mininterval=1, leave=False)
        for number, (request, vector) in enumerate(zip(bar, vectors, strict=True)):
            while running and running[0][0] <= request.arrival_s:
                _, ended, of, forecast = heapq.heappop(running)
                self._learn(requests[ended], of, forecast)
            if vector is None:
                said.append(None)
                continue
            found = predictor.predict(self._history, vector)
            forecast = Forecast(found, self._prior)
            said.append(forecast.blind if self._quality.widened else forecast.said)
            heapq.heappush(running, (ends_s[number], number, vector, forecast))
        return said

    def _vectors(self, requests: Sequence[Logged]) -> Iterator[NDArray[np.float32] | None]:
        texts = [excerpt(request.prompt) for request in requests if request.prompt]
        made = embedded(Embedder(self._config.encoder), texts)
        for request in requests:
            yield next(made) if request.prompt else None

    def _learn(self, request: Logged, vector: NDArray[np.float32], forecast: Forecast) -> None:
        if not request.is_cut:
            self._quality.add(forecast, request.output_tokens)
        self._history.add(Record(vector, request.output_tokens, 0, request.is_cut, "history"))
        self._history.fit()
        self._num_new += 1
        if self._num_new * 100 > len(self._history):
            self._prior = predictor.prior(self._history)
            self._num_new = 0
