"""Sentence vectors without a transformer: means of token vectors, in well under a millisecond."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import token_vectors
from predictor_store.predict.exported_model import MODEL, weights_digest

MAX_TOKENS = 400
# How a prompt begins says what is asked for: its first tokens count once more, by themselves.
_NUM_FIRST = 12
_FIRST_WEIGHT = 0.7
NUM_DIMENSIONS = 2 * token_vectors.NUM_DIMENSIONS
# The first principal axes of the whole and of the first tokens find whom all axes find (docs).
SEARCHED = np.r_[:128, token_vectors.NUM_DIMENSIONS : token_vectors.NUM_DIMENSIONS + 64]


def fingerprint() -> str:
    """Names whatever decides the vectors."""
    recipe = token_vectors.RECIPE
    return f"token vectors {recipe} of all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{weights_digest()}"


class StaticEncoder:
    """The first one on a machine takes half a minute to make."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()
        # The token that an empty prompt is taken for.
        self._padding = [0]
        self._vectors = token_vectors.token_vectors()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Of unit length, shape (len(texts), NUM_DIMENSIONS). texts: in UTF-8."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        vectors = np.empty((len(texts), NUM_DIMENSIONS), np.float32)
        for vector, each in zip(vectors, encoded, strict=True):
            tokens = self._vectors[each.ids or self._padding]
            whole, first = np.split(vector, 2)
            whole[:] = _unit(tokens.mean(0))
            first[:] = _FIRST_WEIGHT * _unit(tokens[:_NUM_FIRST].mean(0))
        vectors /= np.sqrt(np.float32(1 + _FIRST_WEIGHT**2))
        return vectors


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    # Above 0: no sum of token vectors of real text vanishes in float32.
    return vector / np.linalg.norm(vector)
