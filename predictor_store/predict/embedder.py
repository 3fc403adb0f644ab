"""A prompt's vector: what an encoder makes of its meaning, features of its wording, and what its
request says beside (predictor_store.predict.asked)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import asked, minilm, static_encoder
from predictor_store.predict.features import NUM_FEATURES, VERSION, features_of
from sage_sched.config import PredictorConfig

# Of the numbers that come after the encoder's part of a vector.
NUM_BESIDE = NUM_FEATURES + asked.NUM_FEATURES
DEFAULT_ENCODER = PredictorConfig().encoder
# More than either encoder reads of almost any text; bounds what a tokenizer does with one of 1 MB.
MAX_CHARS = 2_000


class Encoder(Protocol):
    """Sentence vectors."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Of unit length, a row each. texts: not empty, in UTF-8."""


@dataclass(frozen=True, slots=True)
class _Kind:
    dimension: int
    fingerprint: Callable[[], str]
    load: Callable[[int | None], Encoder]
    searched: NDArray[np.int64] | None = None


# By the names of predictor.encoder.
_KINDS = {
    "static": _Kind(
        static_encoder.NUM_DIMENSIONS,
        static_encoder.fingerprint,
        lambda num_threads: static_encoder.StaticEncoder(),
        static_encoder.SEARCHED,
    ),
    "minilm": _Kind(minilm.NUM_DIMENSIONS, minilm.fingerprint, minilm.MiniLM),
}


def embedding_dimension(encoder: str = DEFAULT_ENCODER) -> int:
    """Of the encoder's part of a vector, which comes first."""
    return _KINDS[encoder].dimension


def searched_columns(encoder: str = DEFAULT_ENCODER) -> NDArray[np.int64] | None:
    """Those of the encoder's numbers that tell who is near; None for all of them."""
    return _KINDS[encoder].searched


def dimension(encoder: str = DEFAULT_ENCODER) -> int:
    """Of a vector."""
    return embedding_dimension(encoder) + NUM_BESIDE


def fingerprint(encoder: str = DEFAULT_ENCODER) -> str:
    """Names whatever decides the vectors; two stores with equal ones can share them."""
    return f"{_KINDS[encoder].fingerprint()}/features {VERSION}.{asked.VERSION}"


class Embedder:
    """encoder: see PredictorConfig. num_threads: None for all cores."""

    def __init__(self, encoder: str = DEFAULT_ENCODER, num_threads: int | None = None) -> None:
        self.encoder = encoder
        self._encoder = _KINDS[encoder].load(num_threads)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Float32, shape (len(texts), dimension(self.encoder)), of any text whatever: a vector of
        unit length by the encoder, predictor_store.predict.features, and nothing asked beside."""
        if not texts:
            return np.empty((0, dimension(self.encoder)), np.float32)
        encoded = self._encoder.encode([tokenizable(text) for text in texts])
        features = np.array([features_of(text) for text in texts])
        return np.hstack([encoded, features, np.zeros((len(texts), asked.NUM_FEATURES), "f4")])


def tokenizable(text: str) -> str:
    """What of a prompt the tokenizer is given."""
    # The tokenizer takes UTF-8, which lone surrogates have not.
    return text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8")
