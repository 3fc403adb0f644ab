"""What nearest neighbours cost in larger histories: `python -m bench.prediction.search_scale`.

Flat search, in half precision and in full, against FAISS's HNSW and IVF:
milliseconds a search on one thread, the share of the true 100 nearest found, and time to build.
Vectors are made up: clusters as tight as prompts of one topic are (cosine 0.5 within, 0.0 between).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from predictor_store.predict.embedder import embedding_dimension
from predictor_store.predict.vector_index import one_thread

_NUM_QUERIES = 200
_NUM_NEAREST = 100
_PER_CLUSTER = 200
_CHUNK = 50_000
_DIMENSION = embedding_dimension()


def vectors(number: int, seed: int, centers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Unit vectors, float32, shape (number, _DIMENSION)."""
    rng = np.random.default_rng(seed)
    found = np.empty((number, _DIMENSION), np.float32)
    for start in range(0, number, _CHUNK):
        part = found[start : start + _CHUNK]
        part[:] = rng.normal(size=part.shape) / _DIMENSION**0.5
        part += centers[rng.integers(len(centers), size=len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return found


def centers_of(number: int) -> NDArray[np.float32]:
    """Of the clusters of so many vectors."""
    shape = (max(1, number // _PER_CLUSTER), _DIMENSION)
    centers: NDArray[np.float64] = np.random.default_rng(0).normal(size=shape)
    found: NDArray[np.float32] = (centers / _DIMENSION**0.5).astype(np.float32)
    return found


def indexes(number: int) -> dict[str, Any]:
    """FAISS indexes by name, empty."""
    d, inner = _DIMENSION, faiss.METRIC_INNER_PRODUCT
    num_lists = int(4 * number**0.5)
    hnsw = faiss.IndexHNSWFlat(d, 32, inner)
    hnsw.hnsw.efConstruction, hnsw.hnsw.efSearch = 80, 200
    ivf: Any = faiss.index_factory(d, f"IVF{num_lists},Flat", inner)
    ivf.nprobe = max(16, num_lists // 64)
    return {
        "flat": faiss.IndexFlatIP(d),
        "half": faiss.IndexScalarQuantizer(d, faiss.ScalarQuantizer.QT_fp16, inner),
        "HNSW32": hnsw,
        f"IVF{num_lists}": ivf,
    }


def measure(number: int, kinds: list[str]) -> None:
    """Print a row for each index."""
    centers = centers_of(number)
    base, queries = vectors(number, 1, centers), vectors(_NUM_QUERIES, 2, centers)
    truth: NDArray[np.int64] | None = None
    for name, index in indexes(number).items():
        if not name.lower().startswith(("flat", "half", *kinds)):
            continue
        started = time.perf_counter()
        if not index.is_trained:
            index.train(base[: 40 * index.nlist])
        for start in tqdm(range(0, number, _CHUNK), desc=name, leave=False):
            index.add(base[start : start + _CHUNK])
        built_s = time.perf_counter() - started
        spent_ms, found = [], []
        with one_thread():
            for query in queries:
                started = time.perf_counter()
                found.append(index.search(query[np.newaxis], _NUM_NEAREST)[1][0])
                spent_ms.append((time.perf_counter() - started) * 1e3)
        truth = np.array(found) if truth is None else truth
        recall = np.mean([np.isin(a, b).mean() for a, b in zip(truth, found, strict=True)])
        print(
            f"{number:9,d}  {name:8} {np.median(spent_ms):9.2f} {np.quantile(spent_ms, 0.99):9.2f}"
            f" {recall:7.3f} {built_s:9.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", choices=("hnsw", "ivf"), default=["hnsw", "ivf"])
    args = parser.parse_args()
    print("  records  index    median ms    p99 ms  recall  build, s")
    for number in args.sizes:
        measure(number, args.kinds)


if __name__ == "__main__":
    main()
