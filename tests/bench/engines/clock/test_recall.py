"""Vectors that are embedded beforehand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.engines.clock import device_clock, recall
from bench.engines.clock.recall import VECTORS_FILE, RecallingEmbedder, remember
from predictor_store.predict.embedder import Embedder
from predictor_store.predict.features import excerpt

PROMPTS = ["What is the capital of France?", "Write a story. " * 400]


def forbidden(encoder: str, num_threads: int | None = None) -> Embedder:
    raise AssertionError("nothing is to be embedded")


def test_vectors_are_those_of_the_embedder_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedder: Embedder
) -> None:
    monkeypatch.setattr(recall, "Embedder", lambda encoder, num_threads=None: embedder)
    file = tmp_path / "vectors.npz"
    monkeypatch.setenv(VECTORS_FILE, str(file))
    remember(file, PROMPTS[:1])
    recalling = RecallingEmbedder(num_threads=1)
    remember(file, PROMPTS)  # the file grows while a worker runs

    monkeypatch.setattr(recall, "Embedder", forbidden)
    remember(file, PROMPTS)
    asked = [excerpt(prompt) for prompt in PROMPTS]
    for each in (recalling, RecallingEmbedder(num_threads=1)):
        assert np.allclose(each.embed(asked), embedder.embed(asked), atol=1e-5)
    assert recalling.embed([]).shape == embedder.embed([]).shape

    monkeypatch.setattr(recall, "Embedder", lambda encoder, num_threads=None: embedder)
    unknown = ["Is 91 a prime number?"]
    assert np.allclose(recalling.embed(unknown), embedder.embed(unknown), atol=1e-5)


def test_servers_on_a_device_clock_start_this_worker() -> None:
    assert recall.__name__ == device_clock._WORKER_MODULE
    assert device_clock._VECTORS_FILE == VECTORS_FILE
