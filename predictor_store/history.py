"""The history in memory: vectors in a FAISS index, lengths beside them, first in first out."""

from __future__ import annotations

from collections import deque

import faiss
import numpy as np
from numpy.typing import NDArray

from predictor_store.store_file import Origin


class History:
    """Up to capacity records. Warm data goes first, so that it fades as real history comes.

    lengths, int64, censored and warm, bool, each of shape (capacity,), are indexed by slot;
    slots 0 to len(self) - 1 are in use.
    """

    def __init__(self, dimension: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = np.zeros(capacity, np.int64)
        self.censored = np.zeros(capacity, np.bool_)
        self.warm = np.zeros(capacity, np.bool_)
        self._index = faiss.IndexFlatIP(dimension)
        self._oldest_warm: deque[int] = deque()
        self._oldest_history: deque[int] = deque()

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(
        self, vector: NDArray[np.float32], output_tokens: int, censored: bool, origin: Origin
    ) -> None:
        """vector: a unit vector, float32, shape (dimension,). At capacity, a record makes room.

        The oldest warm one, or else the oldest; so a warm one is not taken in where there is
        nothing but history.
        """
        warm = origin == "warm"
        if len(self) < self.capacity:
            slot = len(self)
            self._index.add(vector[np.newaxis])
        elif self._oldest_warm or not warm:
            slot = (self._oldest_warm or self._oldest_history).popleft()
            self._vectors()[slot] = vector
        else:
            return
        self.lengths[slot] = output_tokens
        self.censored[slot] = censored
        self.warm[slot] = warm
        (self._oldest_warm if warm else self._oldest_history).append(slot)

    def nearest(
        self, vector: NDArray[np.float32], num_nearest: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Cosines, float32, falling, and their slots, int64: min(num_nearest, len(self)) each."""
        k = min(num_nearest, len(self))
        if k == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        cosines, slots = self._index.search(vector[np.newaxis], k)
        return cosines[0], slots[0]

    def matches(self, vector: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
        """The slots, int64, of all records whose cosine is at least threshold."""
        # FAISS returns what exceeds the radius.
        below = float(np.nextafter(np.float32(threshold), np.float32(-2)))
        _, _, slots = self._index.range_search(vector[np.newaxis], below)
        return np.asarray(slots, np.int64)

    def _vectors(self) -> NDArray[np.float32]:
        # Taken anew each time: the index moves its memory when it grows. Overwriting in place
        # takes microseconds, FAISS's remove_ids 2 ms.
        view: NDArray[np.float32] = faiss.rev_swig_ptr(
            self._index.get_xb(), len(self) * self._index.d
        )
        return view.reshape(len(self), self._index.d)
