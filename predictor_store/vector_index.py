"""Embeddings in whole numbers of 8 bits, and the nearest of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray


class Codes(NamedTuple):
    """Embeddings as they are kept: whole, int8, shape (n, dimension), of 1 / steps each."""

    whole: NDArray[np.int8]
    steps: np.float32

    def embeddings(self) -> NDArray[np.float32]:
        """Shape (n, dimension)."""
        found: NDArray[np.float32] = self.whole.astype(np.float32) / self.steps
        return found


class VectorIndex:
    """Embeddings of unit length, by slot, from 0 to len(self) - 1.

    columns: of the numbers of an embedding, those that the search reads; the records that it finds
    are then put in order by all numbers. None: it reads all. A search takes as long as it takes to
    read what it reads.
    """

    def __init__(
        self, dimension: int, capacity: int, columns: NDArray[np.int64] | None = None
    ) -> None:
        self._columns = columns
        self._codes = np.zeros((capacity, dimension), np.int8)
        self._searched = empty_index(dimension if columns is None else columns.size)
        self._steps = steps_per_unit(dimension)

    def __len__(self) -> int:
        return int(self._searched.ntotal)

    def add(self, embedding: NDArray[np.float32]) -> None:
        """In the next slot."""
        whole = self._whole(embedding)
        self._codes[len(self)] = whole
        self._searched.add(self._read(whole)[np.newaxis])

    def replace(self, slot: int, embedding: NDArray[np.float32]) -> None:
        # Overwriting in place takes microseconds, FAISS's remove_ids 2 ms.
        whole = self._whole(embedding)
        self._codes[slot] = whole
        # Taken anew each time: the index moves its memory when it grows.
        searched: NDArray[np.uint8] = faiss.rev_swig_ptr(
            self._searched.codes.data(), len(self) * self._searched.code_size
        )
        searched.reshape(len(self), -1)[slot] = self._read(whole) + 128

    def codes(self, slots: NDArray[np.int64]) -> Codes:
        """A copy."""
        return Codes(self._codes[slots], self._steps)

    def nearest(
        self, embedding: NDArray[np.float32], num_nearest: int, among: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Cosines, float32, falling, and their slots, int64: num_nearest each, or as many as there
        are. among: bool, shape (len(self),), the slots to search."""
        k = min(num_nearest, len(self))
        if k == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        query = self._whole(embedding)
        only = None
        if among is not None:
            # FAISS's type stubs do not know what its Python layer makes of these.
            bits = np.packbits(among, bitorder="little")
            selector = faiss.IDSelectorBitmap(bits)  # type: ignore[call-arg, arg-type]
            only = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
        with one_thread():
            products, slots = self._searched.search(self._read(query)[np.newaxis], k, params=only)
        found = slots[0] >= 0  # FAISS fills up with -1
        by_search, nearest = products[0][found], slots[0][found]
        if self._columns is not None:
            by_search = self._codes[nearest].astype(np.float32) @ query
            falling = np.argsort(-by_search, kind="stable")
            by_search, nearest = by_search[falling], nearest[falling]
        return by_search / self._steps**2, nearest

    def _read(self, whole: NDArray[np.float32]) -> NDArray[np.float32]:
        return whole if self._columns is None else whole[self._columns]

    def _whole(self, embedding: NDArray[np.float32]) -> NDArray[np.float32]:
        # A query too: FAISS takes its numbers for whole ones where there are many.
        whole: NDArray[np.float32] = np.rint(self._steps * embedding).clip(-128, 127)
        return whole


def empty_index(dimension: int) -> faiss.IndexScalarQuantizer:
    """For whole numbers from -128 to 127, as a search takes as long as it takes to read them all:
    a quarter as long as of float32."""
    return faiss.IndexScalarQuantizer(
        dimension, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
    )


def steps_per_unit(dimension: int) -> np.float32:
    """By what the numbers of a unit vector are multiplied before they are rounded. A cosine is then
    off by 0.001, where one in a thousand numbers may be cut off (the largest are as large)."""
    return np.float32(127 * max(1.0, dimension**0.5 / 12))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """FAISS would search these with all of OpenMP's threads, even for one vector. That takes the
    cores of the engine, and hangs in a process forked from one that has used those threads."""
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)
