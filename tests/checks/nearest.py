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


def measure(device: str, num_records: int) -> dict[str, Any]:
    """Return figures by search method: milliseconds per query (`median_ms`, `p99_ms`), and the
    `recall` of the true nearest; or the reason why the method is left out."""
    centers = centers_of(num_records)
    base, queries = vectors(num_records, 1, centers), vectors(_NUM_QUERIES, 2, centers)
    index = VectorIndex(base.shape[1])
    for vector in base:
        index.add(vector)
    exact = faiss.IndexFlatIP(base.shape[1])
    exact.add(base)
    truth = np.array([exact.search(query[np.newaxis], _NUM_NEAREST)[1][0] for query in queries])
    found: dict[str, Any] = {
        "history": _timed(lambda query: index.nearest(query[0], _NUM_NEAREST)[1], queries, truth)
    }
    with one_thread():
        found["faiss_cpu"] = _timed(_search_of(exact), queries, truth)
    found["faiss_gpu"] = _on_gpu(exact, queries, truth)
    if device != "cpu":
        records = torch.from_numpy(base).to(device)

        def nearest(query: NDArray[np.float32]) -> NDArray[np.int64]:
            cosines = records @ torch.from_numpy(query[0]).to(device)
            return np.asarray(torch.topk(cosines, _NUM_NEAREST).indices.cpu())

        found["torch_gpu"] = _timed(nearest, queries, truth)
    return found


def _on_gpu(
    exact: Any, queries: NDArray[np.float32], truth: NDArray[np.int64]
) -> dict[str, float] | str:
    if not getattr(faiss, "get_num_gpus", int)():
        return "left out: this build of FAISS has no GPU (the package faiss-gpu-cu12 has)"
    index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, exact)
    return _timed(_search_of(index), queries, truth)


def _search_of(index: Any) -> Callable[[NDArray[np.float32]], NDArray[np.int64]]:
    return lambda query: index.search(query, _NUM_NEAREST)[1][0]


def _timed(
    search: Callable[[NDArray[np.float32]], NDArray[np.int64]],
    queries: NDArray[np.float32],
    truth: NDArray[np.int64],
) -> dict[str, float]:
    search(queries[:1])
    spent_ms, shares = [], []
    for query, nearest in zip(queries, truth, strict=True):
        started = time.perf_counter()
        found = search(query[np.newaxis])
        spent_ms.append((time.perf_counter() - started) * 1e3)
        shares.append(float(np.isin(nearest, found).mean()))
    return {
        "median_ms": float(np.median(spent_ms)),
        "p99_ms": float(np.quantile(spent_ms, 0.99)),
        "recall": float(np.mean(shares)),
    }


def vectors(number: int, seed: int, centers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return synthetic prompts, in clusters as tight as those of one topic: unit vectors, float32,
    shape (number, _DIMENSION)."""
    rng = np.random.default_rng(seed)
    found = np.empty((number, _DIMENSION), np.float32)
    for start in range(0, number, _CHUNK):
        part = found[start : start + _CHUNK]
        part[:] = rng.normal(size=part.shape) / _DIMENSION**0.5
        part += centers[rng.integers(len(centers), size=len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return found


def centers_of(number: int) -> NDArray[np.float32]:
    """Return the centers of the clusters for this number of vectors."""
    shape = (max(1, number // _PER_CLUSTER), _DIMENSION)
    centers: NDArray[np.float64] = np.random.default_rng(0).normal(size=shape)
    found: NDArray[np.float32] = (centers / _DIMENSION**0.5).astype(np.float32)
    return found
