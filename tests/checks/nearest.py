"""Measures a history's searches for the 256 nearest of many records."""

from __future__ import annotations

import time

import numpy as np

from predictor_store.predict.embedder import DEFAULT_ENCODER, ENCODER_TYPES
from predictor_store.predict.index import VectorIndex, one_thread

_PER_CLUSTER = 200
_DIMENSION = ENCODER_TYPES[DEFAULT_ENCODER].num_dimensions
_NUM_QUERIES, _NUM_NEAREST = 50, 256


def measure(num_records: int) -> dict[str, float]:
    """Return milliseconds per query (`median_ms`, `p99_ms`), and the `recall` of the true nearest.

    Records are synthetic, in clusters as tight as those of one topic.
    """
    rng = np.random.default_rng(0)
    shape = (num_records + _NUM_QUERIES, _DIMENSION)
    vectors = rng.standard_normal(shape, np.float32)
    centers = rng.standard_normal((max(1, shape[0] // _PER_CLUSTER), _DIMENSION), np.float32)
    vectors += centers[rng.integers(len(centers), size=len(vectors))]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries, base = vectors[:_NUM_QUERIES], vectors[_NUM_QUERIES:]
    index = VectorIndex(_DIMENSION)
    for vector in base:
        index.add(vector)
    spent_ms, shares = [], []
    with one_thread():
        index.nearest(queries[0], _NUM_NEAREST)
        for query in queries:
            started_s = time.perf_counter()
            _, found = index.nearest(query, _NUM_NEAREST)
            spent_ms.append((time.perf_counter() - started_s) * 1e3)
            nearest = np.argpartition(base @ query, -_NUM_NEAREST)[-_NUM_NEAREST:]
            shares.append(np.isin(nearest, found).mean())
    return {
        "median_ms": float(np.median(spent_ms)),
        "p99_ms": float(np.quantile(spent_ms, 0.99)),
        "recall": float(np.mean(shares)),
    }
