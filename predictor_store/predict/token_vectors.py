"""A vector for each token of the vocabulary, distilled from the packaged MiniLM, made once and kept
in the user's cache."""

from __future__ import annotations

import io
import sys

import numpy as np
from numpy.typing import NDArray

from predictor_store.cached_file import cache_folder, read_cached, write_cached
from predictor_store.predict.exported_model import INPUTS, MODEL, exported_model, weights_digest

NUM_DIMENSIONS = 384
# Part of the cached file's name and of the encoder's fingerprint: a change of how vectors are made
# is a new file, and a store of the old ones is not read.
RECIPE = 1
# All constants: the best or next to it on each of seven datasets (docs/predictor.md).
_WHITENING = 0.25
_RANK_POWER = 1.5
_BATCH_SIZE = 512


def token_vectors() -> NDArray[np.float32]:
    """Shape (vocabulary, NUM_DIMENSIONS). Takes ten seconds of a core the first time."""
    path = cache_folder() / f"token-vectors-{weights_digest()}-{RECIPE}.npy"
    content = read_cached(path)
    if content is None:
        print("making the token vectors, once; it takes a moment", file=sys.stderr)
        content = _encoded(distilled(_alone()))
        try:
            write_cached(path, content)
        except OSError as error:
            print(f"the token vectors will be made at each start: {error}", file=sys.stderr)
    vectors: NDArray[np.float32] = np.load(io.BytesIO(content), allow_pickle=False)
    return vectors


def distilled(alone: NDArray[np.float32]) -> NDArray[np.float32]:
    """alone: what the model makes of each token by itself, shape (vocabulary, any), in the order of
    the vocabulary, which is about that of word frequency.

    Centred, turned to their principal axes, of which the strong ones are weakened (the model's
    vectors are crowded along a few), and the more frequent a word is, the less it weighs. Every
    host makes the same of the same model but for rounding, as each axis points to where the third
    moment is positive: coefficients that are fitted on one host are good on all.
    """
    centred = alone.astype(np.float64) - alone.mean(0, dtype=np.float64)
    variances, axes = np.linalg.eigh(centred.T @ centred / len(centred))
    strongest = slice(-1, -NUM_DIMENSIONS - 1, -1)
    turned = centred @ axes[:, strongest]
    turned *= np.sign(np.power(turned, 3).sum(0))
    # The weakest has next to none, and is left so.
    turned /= np.maximum(variances[strongest], 1e-6) ** (_WHITENING / 2)
    ranks = np.arange(1, len(turned) + 1)
    weights = np.log1p(ranks) ** _RANK_POWER
    vectors: NDArray[np.float32] = (turned * weights[:, np.newaxis]).astype(np.float32)
    return vectors


def _alone() -> NDArray[np.float32]:
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    first, last = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    session = onnxruntime.InferenceSession(exported_model(), providers=["CPUExecutionProvider"])
    found = []
    for start in range(0, tokenizer.get_vocab_size(), _BATCH_SIZE):
        end = min(start + _BATCH_SIZE, tokenizer.get_vocab_size())
        ids = np.array([[first, token, last] for token in range(start, end)], np.int64)
        inputs = dict(zip(INPUTS, (ids, np.ones_like(ids)), strict=True))
        found.append(session.run(None, inputs)[0])
    return np.concatenate(found)


def _encoded(vectors: NDArray[np.float32]) -> bytes:
    content = io.BytesIO()
    np.save(content, vectors)
    return content.getvalue()
