"""Sentence vectors without a transformer: means of token vectors, in well under a millisecond.

The token vectors are distilled from the packaged MiniLM once, and kept in the user's cache.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor_store.cached_file import made_once
from predictor_store.predict.minilm import INPUTS, exported_model, tokenizer, weights_digest

MAX_TOKENS = 400
# How a prompt begins says what is asked for: its first tokens count once more, by themselves.
_NUM_FIRST = 12
_FIRST_WEIGHT = 0.7
# The dimensions of a token's vector.
_NUM_DIMENSIONS = 384
# Part of the cached file's name and of the encoder's fingerprint: a change of how vectors are made
# is a new file, and a store of the old ones is not read.
_RECIPE = 1
# All constants: the best or next to it on each of seven datasets (docs/predictor.md).
_WHITENING = 0.25
_RANK_POWER = 1.5
_BATCH_SIZE = 512


class StaticEncoder:
    """The first one on a machine takes half a minute to make. It uses one thread."""

    num_dimensions = 2 * _NUM_DIMENSIONS
    # The first principal axes of the whole and of the first tokens find the same neighbours as all
    # axes do (docs/predictor.md).
    searched: NDArray[np.int64] | None = np.r_[:128, _NUM_DIMENSIONS : _NUM_DIMENSIONS + 64]

    def __init__(self, num_threads: int | None = None) -> None:
        self._tokenizer = tokenizer(MAX_TOKENS)
        self._vectors = token_vectors()

    @staticmethod
    def fingerprint() -> str:
        return f"token vectors {_RECIPE} of all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{weights_digest()}"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of unit length, shape (len(texts), num_dimensions). texts: valid UTF-8."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        vectors = np.empty((len(texts), self.num_dimensions), np.float32)
        for vector, each in zip(vectors, encoded, strict=True):
            tokens = self._vectors[each.ids or [0]]  # an empty prompt is taken for one of padding
            whole, first = np.split(vector, 2)
            whole[:] = _unit(tokens.mean(0))
            first[:] = _FIRST_WEIGHT * _unit(tokens[:_NUM_FIRST].mean(0))
        vectors /= np.sqrt(np.float32(1 + _FIRST_WEIGHT**2))
        return vectors


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    # Above 0: no sum of token vectors of real text vanishes in float32.
    return vector / np.linalg.norm(vector)


def token_vectors() -> NDArray[np.float32]:
    """Shape (vocabulary, 384). Takes ten seconds of a core the first time."""

    def make() -> bytes:
        content = io.BytesIO()
        np.save(content, distilled(_alone()))
        return content.getvalue()

    name = f"token-vectors-{weights_digest()}-{_RECIPE}.npy"
    content = made_once(name, "making the token vectors", make)
    vectors: NDArray[np.float32] = np.load(io.BytesIO(content), allow_pickle=False)
    return vectors


def distilled(alone: NDArray[np.float32]) -> NDArray[np.float32]:
    """Token vectors from what the model makes of each token by itself.

    alone: shape (vocabulary, any), in the order of the vocabulary, which is about that of word
    frequency. Vectors are centred and turned to their principal axes; strong axes are weakened (the
    model's vectors crowd along a few), and frequent words weigh less. Each axis points to where the
    third moment is positive, so that every host makes the same of the same model but for rounding,
    and coefficients that were fitted on one host are good on all.
    """
    centred = alone.astype(np.float64) - alone.mean(0, dtype=np.float64)
    variances, axes = np.linalg.eigh(centred.T @ centred / len(centred))
    strongest = slice(-1, -_NUM_DIMENSIONS - 1, -1)
    turned = centred @ axes[:, strongest]
    turned *= np.sign(np.power(turned, 3).sum(0))
    # The weakest axis has next to no variance, and stays so.
    turned /= np.maximum(variances[strongest], 1e-6) ** (_WHITENING / 2)
    ranks = np.arange(1, len(turned) + 1)
    weights = np.log1p(ranks) ** _RANK_POWER
    vectors: NDArray[np.float32] = (turned * weights[:, np.newaxis]).astype(np.float32)
    return vectors


def _alone() -> NDArray[np.float32]:
    import onnxruntime

    vocabulary = tokenizer(MAX_TOKENS)
    first, last = (vocabulary.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    session = onnxruntime.InferenceSession(exported_model(), providers=["CPUExecutionProvider"])
    found = []
    for start in range(0, vocabulary.get_vocab_size(), _BATCH_SIZE):
        end = min(start + _BATCH_SIZE, vocabulary.get_vocab_size())
        ids = np.array([[first, token, last] for token in range(start, end)], np.int64)
        inputs = dict(zip(INPUTS, (ids, np.ones_like(ids)), strict=True))
        found.append(session.run(None, inputs)[0])
    return np.concatenate(found)
