from __future__ import annotations

import pytest

from predictor_store.predict.embedder import Embedder


@pytest.fixture(autouse=True)
def _one_encoder(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of this process share one encoder by default."""

    def of(encoder: str, num_threads: int) -> Embedder:
        return embedder if encoder == embedder.encoder else Embedder(encoder, num_threads)

    monkeypatch.setattr("predictor_store.service.worker.Embedder", of)
