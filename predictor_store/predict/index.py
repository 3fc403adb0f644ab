"""Searches nearest neighbours among embeddings, which are kept as 8-bit integers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import faiss
import numpy as np
from numpy.typing import NDArray


class VectorIndex:
    """Embeddings of unit length, by slot, from 0 to len(self) - 1.

    columns: the columns of the embeddings that a search reads; the fewer, the faster it is. The
        found embeddings are then ordered by all columns. None: a search reads all columns.
    """

    def __init__(self, dimension: int, columns: NDArray[np.int64] | None = None) -> None:
        self._columns = columns
        self._whole_index = empty_index(dimension)
        self._searched: faiss.Index = self._whole_index
        if columns is not None:
            self._read_index = empty_index(columns.size)
            chosen = faiss.RemapDimensionsTransform(dimension, columns.size)
            faiss.copy_array_to_vector(columns.astype(np.int32), chosen.map)
            read = faiss.IndexPreTransform(chosen, self._read_index)
            self._searched = faiss.IndexRefine(read, self._whole_index)
        self._steps = steps_per_unit(dimension)

    def __len__(self) -> int:
        return int(self._searched.ntotal)

    def add(self, embeddings: NDArray[np.float32]) -> None:
        """Add embeddings, shape (n, dimension), in the next slots."""
        self._searched.add(self._whole(embeddings))

    def replace(self, slot: int, embedding: NDArray[np.float32]) -> None:
        # Overwriting in place takes microseconds, FAISS's remove_ids 2 ms.
        whole = self._whole(embedding)
        _codes_of(self._whole_index)[slot] = whole + 128
        if self._columns is not None:
            _codes_of(self._read_index)[slot] = whole[self._columns] + 128

    def codes(self, slots: NDArray[np.int64]) -> NDArray[np.int8]:
        """Return a copy of the embeddings as they are kept: integers, shape (n, dimension)."""
        return (_codes_of(self._whole_index)[slots] ^ 128).view(np.int8)

    def nearest(
        self, embedding: NDArray[np.float32], num_nearest: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the cosines (float32, falling) and slots (int64) of num_nearest embeddings, or of
        all if there are fewer."""
        k = min(num_nearest, len(self))
        if k == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        query = self._whole(embedding)[np.newaxis]
        with one_thread():
            products, slots = self._searched.search(query, k)
        return products[0] / self._steps**2, slots[0]

    def _whole(self, embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
        # A query is rounded too: in a large index, FAISS takes its numbers for integers.
        return np.asarray(np.rint(self._steps * embeddings).clip(-128, 127), np.float32)


def _codes_of(index: faiss.IndexScalarQuantizer) -> NDArray[np.uint8]:
    """Return the index's memory, shape (n, dimension), with 128 added to each number. Do not
    keep the array: a growing index moves its memory."""
    if index.ntotal == 0:
        return np.empty((0, index.code_size), np.uint8)
    codes = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size)
    return np.asarray(codes, np.uint8).reshape(index.ntotal, index.code_size)


def empty_index(dimension: int) -> faiss.IndexScalarQuantizer:
    """Return an index for integers from -128 to 127. A search reads a quarter of the bytes that it
    would read with float32, and takes a quarter of the time."""
    return faiss.IndexScalarQuantizer(
        dimension, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
    )


def steps_per_unit(dimension: int) -> np.float32:
    """Return the factor by which a unit vector is multiplied before rounding. About one in a
    thousand numbers is clipped. A cosine is off by about 0.001."""
    return np.float32(127 * max(1.0, dimension**0.5 / 12))


def embeddings(codes: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return the embeddings of VectorIndex.codes, of the same shape."""
    return np.asarray(codes.astype(np.float32) / steps_per_unit(codes.shape[1]), np.float32)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit FAISS to one thread. Otherwise it searches with all of OpenMP's threads, even for one
    vector. These would take the engine's cores, and would hang in a forked process whose parent has
    used them."""
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)
