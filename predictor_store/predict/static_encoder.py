"""Makes sentence vectors without a transformer, as means of token vectors, in well under a
millisecond.

The token vectors are distilled from MiniLM and shipped; token_vectors.md says how.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from predictor_store.predict.minilm import WEIGHTS_DIGEST

SHIPPED_FILE = Path(__file__).with_name("token_vectors.npz")
TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
# The digest of the shipped file; `python -m bench.predictor.distil` prints it.
_DIGEST = "35fd684424aea95a963c9b2842a853a1b7840e8dadf97bf1a9c94caf1c66e97f"
MAX_TOKENS = 400
# A prompt states its task at its beginning, so the mean of its first tokens is a second part of the
# vector.
_NUM_FIRST = 12
_FIRST_WEIGHT = 0.7
# The dimensions of a token's vector.
NUM_DIMENSIONS = 384
# Part of the encoder's fingerprint. Increase this if vectors are made differently, so that a
# store of old vectors is not read.
_RECIPE = 1


class StaticEncoder:
    """Encodes texts in one thread."""

    num_dimensions = 2 * NUM_DIMENSIONS
    # The first principal axes of both parts of a vector: the mean of all tokens, and the mean of
    # the first tokens. A search over these finds the same neighbours as a search over all axes
    # (docs/predictor.md).
    searched: NDArray[np.int64] | None = np.r_[:128, NUM_DIMENSIONS : NUM_DIMENSIONS + 64]

    def __init__(self, num_threads: int | None = None) -> None:
        self._tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()
        self._rounded, self._scales = token_vectors()

    @staticmethod
    def fingerprint() -> str:
        return f"token vectors {_RECIPE} of all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{WEIGHTS_DIGEST}"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors of unit length, shape (len(texts), num_dimensions). texts: valid UTF-8."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        vectors = np.empty((len(texts), self.num_dimensions), np.float32)
        for vector, each in zip(vectors, encoded, strict=True):
            ids = each.ids or [0]  # an empty prompt is treated as one padding token
            tokens = self._rounded[ids] * self._scales[ids, np.newaxis]
            whole, first = np.split(vector, 2)
            whole[:] = _unit(tokens.mean(0))
            first[:] = _FIRST_WEIGHT * _unit(tokens[:_NUM_FIRST].mean(0))
        vectors /= np.sqrt(np.float32(1 + _FIRST_WEIGHT**2))
        return vectors


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    # The norm is above 0: no sum of token vectors of real text vanishes in float32.
    return vector / np.linalg.norm(vector)


def token_vectors() -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return arrays of shape (vocabulary, 384) and (vocabulary,): a row times its scale is a
    token's vector. Raises ValueError if the shipped file is damaged."""
    content = SHIPPED_FILE.read_bytes()
    if digest(content) != _DIGEST:
        raise ValueError(f"{SHIPPED_FILE} is damaged")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return arrays["vectors"], arrays["scales"]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
