"""Measures searches for the 256 nearest of many records.

It compares a server's history, FAISS's flat search on the CPU and (if this build supports it) on
the GPU, and torch on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from predictor_store.predict.embedder import DEFAULT_ENCODER, ENCODER_TYPES
from predictor_store.predict.index import VectorIndex, one_thread

_PER_CLUSTER = 200
_CHUNK = 50_000
_DIMENSION = ENCODER_TYPES[DEFAULT_ENCODER].num_dimensions
_NUM_QUERIES = 50
_NUM_NEAREST = 256
# Of a vector of shape (_DIMENSION,), float32, to the numbers of the nearest records.
Search = Callable[[NDArray[np.float32]], Any]


def measure(device: str, num_records: int) -> dict[str, Any]:
    """Return figures by search method: milliseconds per query (`median_ms`, `p99_ms`), and the
    `recall` of the true nearest; or the reason why the method is left out."""
    found = vectors(num_records + _NUM_QUERIES)
    queries, base = found[:_NUM_QUERIES], found[_NUM_QUERIES:]
    index = VectorIndex(_DIMENSION)
    for vector in base:
        index.add(vector)
    exact = faiss.IndexFlatIP(_DIMENSION)
    exact.add(base)
    searches: dict[str, Search] = {
        "history": lambda query: index.nearest(query, _NUM_NEAREST)[1],
        "faiss_cpu": _search_of(exact),
    }
    if has_gpu := getattr(faiss, "get_num_gpus", int)():
        on_gpu = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, exact)
        searches["faiss_gpu"] = _search_of(on_gpu)
    if device != "cpu":
        records = torch.from_numpy(base).to(device)

        def nearest(query: NDArray[np.float32]) -> Any:
            cosines = records @ torch.from_numpy(query).to(device)
            return torch.topk(cosines, _NUM_NEAREST).indices.cpu().numpy()

        searches["torch_gpu"] = nearest
    truth = [_search_of(exact)(query) for query in queries]
    with one_thread():
        figures: dict[str, Any] = {
            name: _timed(search, queries, truth) for name, search in searches.items()
        }
    left_out = "left out: this build of FAISS has no GPU (the package faiss-gpu-cu12 has)"
    return figures if has_gpu else figures | {"faiss_gpu": left_out}


def _search_of(index: Any) -> Search:
    return lambda query: index.search(query[np.newaxis], _NUM_NEAREST)[1][0]


def _timed(search: Search, queries: NDArray[np.float32], truth: list[Any]) -> dict[str, float]:
    search(queries[0])
    spent_ms, shares = [], []
    for query, nearest in zip(queries, truth, strict=True):
        started = time.perf_counter()
        found = search(query)
        spent_ms.append((time.perf_counter() - started) * 1e3)
        shares.append(float(np.isin(nearest, found).mean()))
    return {
        "median_ms": float(np.median(spent_ms)),
        "p99_ms": float(np.quantile(spent_ms, 0.99)),
        "recall": float(np.mean(shares)),
    }


def vectors(number: int) -> NDArray[np.float32]:
    """Return synthetic prompts, in clusters as tight as those of one topic: unit vectors, float32,
    shape (number, _DIMENSION)."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(max(1, number // _PER_CLUSTER), _DIMENSION)) / _DIMENSION**0.5
    found = np.empty((number, _DIMENSION), np.float32)
    for start in range(0, number, _CHUNK):
        part = found[start : start + _CHUNK]
        part[:] = rng.normal(size=part.shape) / _DIMENSION**0.5
        part += centers[rng.integers(len(centers), size=len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return found
