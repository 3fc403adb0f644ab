"""The history in memory: vectors in a FAISS index, lengths beside them, first in first out."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from predictor_store.length_score import LengthScore
from predictor_store.store_file import Origin

# A score is fitted to so many at most, the newest: past them it only takes longer.
_MAX_FITTED = 20_000
# It is fitted anew when this share of the history is new.
_REFIT_SHARE = 0.05


class Fitting(NamedTuple):
    """What a fit needs, copied, so that it can run beside the history's use.

    slots and stamps, int64: where the records were, and which (they may have made room since).
    """

    slots: NDArray[np.int64]
    stamps: NDArray[np.int64]
    vectors: NDArray[np.float32]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]

    def fit(self) -> tuple[LengthScore, NDArray[np.float64]] | None:
        """LengthScore.fit; touches no history, so that any thread may run it."""
        return LengthScore.fit(self.vectors, self.lengths, self.prompts)


class History:
    """Up to capacity records. Warm data goes first, so that it fades as real history comes.

    By slot, each of shape (capacity,), in use from 0 to len(self) - 1: lengths, int64; censored
    and warm, bool; scopes, int64 (numbers of scope()); scores, float64, see LengthScore; features,
    float32, of shape (capacity, num_features); num_of_same_prompt, int64, how many there are of a
    record's prompt.
    """

    def __init__(self, embedding_dimension: int, num_features: int, capacity: int) -> None:
        """Vectors are an embedding, of unit length, and then features."""
        self.capacity = capacity
        self.lengths = np.zeros(capacity, np.int64)
        self.censored = np.zeros(capacity, np.bool_)
        self.warm = np.zeros(capacity, np.bool_)
        self.scopes = np.zeros(capacity, np.int64)
        self.scores = np.zeros(capacity, np.float64)
        self.score: LengthScore | None = None
        self.features = np.zeros((capacity, num_features), np.float32)
        self._prompts = np.zeros(capacity, np.int64)
        self._slots_of_prompt: defaultdict[int, set[int]] = defaultdict(set)
        self.num_of_same_prompt = np.zeros(capacity, np.int64)
        self._scope_numbers: dict[str, int] = {}
        self._index = empty_index(embedding_dimension)
        self._oldest_warm: deque[int] = deque()
        self._oldest_history: deque[int] = deque()
        self._stamps = np.zeros(capacity, np.int64)
        self._num_added = 0
        self._num_unfitted = 0

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def scope(self, name: str) -> int:
        """The number of the traffic of this name, such as that of one LoRA adapter."""
        return self._scope_numbers.setdefault(name, len(self._scope_numbers))

    def add(
        self,
        vector: NDArray[np.float32],
        output_tokens: int,
        censored: bool,
        origin: Origin,
        scope: str = "",
    ) -> None:
        """vector: float32, shape (embedding_dimension + num_features,). At capacity, a record
        makes room.

        The oldest warm one, or else the oldest; so a warm one is not taken in where there is
        nothing but history.
        """
        warm = origin == "warm"
        embedding = vector[: self._index.d]
        if len(self) < self.capacity:
            slot = len(self)
            self._index.add(embedding[np.newaxis])
        elif self._oldest_warm or not warm:
            slot = (self._oldest_warm or self._oldest_history).popleft()
            self._embeddings()[slot] = embedding
            self._leave_prompt(slot)
        else:
            return
        self.lengths[slot] = output_tokens
        self.censored[slot] = censored
        self.warm[slot] = warm
        self.scopes[slot] = self.scope(scope)
        self.features[slot] = vector[self._index.d :]
        self._join_prompt(slot, _prompt_number(vector))
        if self.score is not None:
            self.scores[slot] = self.score.of(vector[np.newaxis])[0]
        self._num_added += 1
        self._num_unfitted += 1
        self._stamps[slot] = self._num_added
        (self._oldest_warm if warm else self._oldest_history).append(slot)

    def nearest(
        self, vector: NDArray[np.float32], num_nearest: int, among: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Cosines, float32, falling, and their slots, int64: num_nearest each, or as many as there
        are. among: bool, shape (len(self),), the slots to search."""
        k = min(num_nearest, len(self))
        if k == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        query = np.ascontiguousarray(vector[np.newaxis, : self._index.d])
        only = None
        if among is not None:
            # FAISS's type stubs do not know what its Python layer makes of these.
            bits = np.packbits(among, bitorder="little")
            selector = faiss.IDSelectorBitmap(bits)  # type: ignore[call-arg, arg-type]
            only = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
        with one_thread():
            cosines, slots = self._index.search(query, k, params=only)
        found = slots[0] >= 0  # FAISS fills up with -1
        return cosines[0][found], slots[0][found]

    def vectors(self, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """A copy, shape (len(slots), embedding_dimension + num_features)."""
        return np.hstack([self._embeddings()[slots].astype(np.float32), self.features[slots]])

    def fitting(self) -> Fitting | None:
        """What to fit a score to; None where the one that there is will do."""
        if self._num_unfitted <= _REFIT_SHARE * len(self):
            return None
        self._num_unfitted = 0
        slots = np.argsort(-self._stamps[: len(self)], kind="stable")[:_MAX_FITTED]
        stamps, lengths, prompts = (
            values[slots] for values in (self._stamps, self.lengths, self._prompts)
        )
        return Fitting(slots, stamps, self.vectors(slots), lengths, prompts)

    def install(
        self, fitting: Fitting, fitted: tuple[LengthScore, NDArray[np.float64]] | None
    ) -> None:
        """What Fitting.fit made of fitting(); None changes nothing."""
        if fitted is None:
            return
        self.score, held_out = fitted
        size = len(self)
        self.scores[:size] = self.score.of(self.vectors(np.arange(size)))
        same = self._stamps[fitting.slots] == fitting.stamps
        self.scores[fitting.slots[same]] = held_out[same]

    def fit(self) -> None:
        """At once, as for a history that will not grow; takes 0.3 s at 10,000 records."""
        if (fitting := self.fitting()) is not None:
            self.install(fitting, fitting.fit())

    def _join_prompt(self, slot: int, prompt: int) -> None:
        self._prompts[slot] = prompt
        same = self._slots_of_prompt[prompt]
        same.add(slot)
        self.num_of_same_prompt[list(same)] = len(same)

    def _leave_prompt(self, slot: int) -> None:
        prompt = int(self._prompts[slot])
        same = self._slots_of_prompt[prompt]
        same.remove(slot)
        self.num_of_same_prompt[list(same)] = len(same)
        if not same:
            del self._slots_of_prompt[prompt]

    def _embeddings(self) -> NDArray[np.float16]:
        # Taken anew each time: the index moves its memory when it grows. Overwriting in place
        # takes microseconds, FAISS's remove_ids 2 ms.
        codes: NDArray[np.uint8] = faiss.rev_swig_ptr(
            self._index.codes.data(), len(self) * self._index.code_size
        )
        return codes.view(np.float16).reshape(len(self), self._index.d)


def empty_index(dimension: int) -> faiss.IndexScalarQuantizer:
    """Vectors in halves, as a search takes as long as it takes to read them all: half as long, and
    a cosine is off by 1e-4 at most."""
    return faiss.IndexScalarQuantizer(
        dimension, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """FAISS would search halves with all of OpenMP's threads, even for one vector. That takes the
    cores of the engine, and hangs in a process forked from one that has used those threads."""
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)


def _prompt_number(vector: NDArray[np.float32]) -> int:
    # One prompt's vectors differ in their last bits, by the batch that it was embedded in; so
    # rounded, one in a thousand pairs comes apart.
    return hash(np.round(vector[:16] * 100).astype(np.int8).tobytes())
