"""Sentence vectors by all-MiniLM-L6-v2, read from site-packages, computed by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict.exported_model import INPUTS, MODEL, exported_model, weights_digest

NUM_DIMENSIONS = 384
# The length the model was trained with (model card). It accepts 256, at over twice the time: on
# one core a long prompt takes 34 ms with 128 tokens, 80 ms with 256.
MAX_TOKENS = 128

_BATCH_SIZE = 32


def fingerprint() -> str:
    """Names whatever decides the vectors."""
    return f"all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{weights_digest()}"


class MiniLM:
    """The first one on a machine takes seconds to load. num_threads: None for all cores."""

    def __init__(self, num_threads: int | None = None) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads or 0
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()
        self._session = onnxruntime.InferenceSession(
            exported_model(), options, providers=["CPUExecutionProvider"]
        )

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Of unit length, shape (len(texts), NUM_DIMENSIONS). texts: in UTF-8."""
        vectors = np.empty((len(texts), NUM_DIMENSIONS), np.float32)
        tokens = [np.array(each.ids, np.int64) for each in self._tokenizer.encode_batch(texts)]
        # Alike in length together, so that short ones are not padded to long ones.
        order = np.argsort([len(ids) for ids in tokens], kind="stable")
        for start in range(0, len(texts), _BATCH_SIZE):
            chosen = order[start : start + _BATCH_SIZE]
            inputs = _padded([tokens[i] for i in chosen])
            vectors[chosen] = self._session.run(None, inputs)[0]
        return vectors


def _padded(tokens: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """The model's INPUTS, each of shape (prompts, tokens of the longest)."""
    lengths = np.array([len(ids) for ids in tokens])
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(mask.shape, np.int64)
    padded[mask] = np.concatenate(tokens)
    return dict(zip(INPUTS, (padded, mask.astype(np.int64)), strict=True))
