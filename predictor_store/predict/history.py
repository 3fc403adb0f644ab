"""Keeps past answers in memory: an index of vectors, and their lengths. The oldest are dropped
first."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import asked
from predictor_store.predict.embedder import ENCODER_TYPES, NUM_BESIDE
from predictor_store.predict.index import VectorIndex, embeddings
from predictor_store.predict.regression import MIN_PROMPTS, GeneralLength, LengthScore
from predictor_store.store.file import Record

# A score is fitted to this many of the newest records. More would only take longer.
_MAX_FITTED = 20_000
# The score is fitted again when this share of the history is new.
_REFIT_SHARE = 0.05
# A search looks at up to this many times as many records as it returns.
_MOST_WIDENED = 64
# This many answers with the same limits show where such an answer ends.
_LEAST_KNOWN = 30
# This many records are loaded at a time. Other threads run in between.
_LOADED_AT_ONCE = 500
# If two vectors have at least this cosine, their prompts are the same, except perhaps for a number
# or a name.
SAME_COSINE = 0.99


class Place(NamedTuple):
    """A record: its slot, and its stamp, because another record may have taken the slot since."""

    slot: int
    stamp: int


Fitted = tuple[LengthScore, NDArray[np.float64]] | None


class Fitting(NamedTuple):
    """A fit to a copy of the records, so that the history can be used meanwhile.

    slots, stamps: int64, the places of the records (see Place). fit: runs the fit, see
        LengthScore.fit.
    """

    slots: NDArray[np.int64]
    stamps: NDArray[np.int64]
    fit: Callable[[], Fitted]


class History:
    """Keeps at most capacity records. When it is full, warm records are dropped first, then the
    oldest.

    Arrays by slot have shape (capacity,) and are in use from 0 to len(self) - 1:
    lengths: int64.
    censored, warm: bool.
    unfinished: bool; the answer is still growing: it is censored, and no score is fitted to it.
    scopes, limits: int64, of the adapter and of the limits, see number_of().
    limited, shaped: bool; whether its end is not OWN, and whether it is SHAPED (asked.Scope).
    kinds: int64, see asked.kinds_of.
    scores: float64, see LengthScore.
    excess: float64, see GeneralLength.level_after.
    features: float32, of shape (capacity, num_features).
    """

    def __init__(
        self,
        embedding_dimension: int,
        num_features: int,
        capacity: int,
        general: GeneralLength | None = None,
        columns: NDArray[np.int64] | None = None,
    ) -> None:
        """Make an empty history. A vector is an embedding of unit length, followed by features.

        general: None if no general lengths are known. columns: see VectorIndex.
        """
        self.capacity = capacity
        self.lengths = np.zeros(capacity, np.int64)
        self.censored = np.zeros(capacity, np.bool_)
        self.unfinished = np.zeros(capacity, np.bool_)
        self.warm = np.zeros(capacity, np.bool_)
        self.scopes = np.zeros(capacity, np.int64)
        self.limits = np.zeros(capacity, np.int64)
        self.limited = np.zeros(capacity, np.bool_)
        self.shaped = np.zeros(capacity, np.bool_)
        self.kinds = np.zeros(capacity, np.int64)
        self.scores = np.zeros(capacity, np.float64)
        self.general = general
        self.score = None if general is None else general.first_score()
        self.excess = np.zeros(capacity, np.float64)
        self.features = np.zeros((capacity, num_features), np.float32)
        self._prompts = np.zeros(capacity, np.int64)
        self._num_of_prompt = Counter[int]()
        self._dimension = embedding_dimension
        self._index = VectorIndex(embedding_dimension, columns)
        self._oldest_warm: deque[int] = deque()
        self._oldest_history: deque[int] = deque()
        self._stamps = np.zeros(capacity, np.int64)
        self._num_added = 0
        self._num_unfitted = 0

    @classmethod
    def of_encoder(cls, encoder: str, capacity: int, general: GeneralLength | None) -> Self:
        of = ENCODER_TYPES[encoder]
        return cls(of.num_dimensions, NUM_BESIDE, capacity, general, of.searched)

    def __len__(self) -> int:
        return len(self._index)

    @staticmethod
    def number_of(name: str) -> int:
        """Return a number for an adapter or limits of this name; 0 for ""."""
        return hash(name)

    def strange(self, limits: int) -> NDArray[np.bool_]:
        """Return which records were ended by other limits than these, and so do not help to
        predict."""
        num = len(self)
        strange: NDArray[np.bool_] = self.limited[:num] & (self.limits[:num] != limits)
        return strange

    def knows(self, scope: asked.Scope) -> bool:
        """Whether enough answers are known to predict where an answer of this scope ends."""
        if scope.end == asked.OWN:
            return True
        same = self.limits[: len(self)] == self.number_of(scope.limits)
        return int(same.sum()) >= _LEAST_KNOWN

    def kinds_of(self, vectors: NDArray[np.float32]) -> NDArray[np.int64]:
        if self.features.shape[1] < asked.NUM_FEATURES:
            return np.zeros(len(vectors), np.int64)
        return asked.kinds_of(vectors[:, -asked.NUM_FEATURES :])

    def num_of_same_prompt(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([self._num_of_prompt[of] for of in self._prompts[slots].tolist()], np.int64)

    def add(self, record: Record, *, unfinished: bool = False) -> Place | None:
        """Add a record and return its place. Return None, and add nothing, if it is warm and the
        history is full of records that are not.

        unfinished: amend() will follow. Until then the record is censored.
        """
        warm = record.origin == "warm"
        if len(self) < self.capacity:
            slot = len(self)
            self._append([record], unfinished=unfinished)
        elif self._oldest_warm or not warm:
            slot = (self._oldest_warm or self._oldest_history).popleft()
            left = int(self._prompts[slot])
            self._num_of_prompt[left] -= 1
            if not self._num_of_prompt[left]:
                del self._num_of_prompt[left]
            self._write(slot, [record], unfinished=unfinished)
            self._index.replace(slot, record.vector[: self._dimension])
        else:
            return None
        return Place(slot, self._num_added)

    def load(self, records: Iterable[Record]) -> None:
        """Add records as add() does, oldest first, but many at a time while there is room."""
        left = iter(records)
        while room := min(self.capacity - len(self), _LOADED_AT_ONCE):
            if not (some := list(islice(left, room))):
                return
            self._append(some)
        for record in left:
            self.add(record)

    def amend(self, place: Place, record: Record, *, unfinished: bool = False) -> bool:
        """Set the answer's new length. Return False if the record at place has been dropped."""
        slot, stamp = place
        if self._stamps[slot] != stamp:
            return False
        self._write_answers(slot, [record], record.vector[np.newaxis])
        self._num_unfitted += bool(self.unfinished[slot]) and not unfinished
        self.unfinished[slot] = unfinished
        return True

    def nearest(
        self,
        vector: NDArray[np.float32],
        num_nearest: int,
        cut: NDArray[np.bool_] | None = None,
        hidden: NDArray[np.bool_] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the cosines (float32, falling) and slots (int64) of num_nearest records, or of all
        if there are fewer. If more than num_nearest are of this very prompt, return the newest.

        cut, hidden: whether a record carries little information or none, shape (len(self),). Hidden
        records are left out. If most of num_nearest are cut, more are returned, until a quarter of
        num_nearest are uncut, because any client can make many cut answers at no cost.
        """
        hidden = np.zeros(len(self), np.bool_) if hidden is None else hidden
        told = ~hidden if cut is None else ~(hidden | cut)
        num_sought, most_sought = num_nearest, _MOST_WIDENED * num_nearest
        while True:
            cosines, slots = self._index.nearest(vector[: self._dimension], num_sought)
            seen = np.cumsum(~hidden[slots])
            is_enough = (seen >= num_nearest) & (np.cumsum(told[slots]) >= num_nearest // 4)
            if is_enough.any() or slots.size < num_sought or num_sought >= most_sought:
                break
            num_sought *= 4
        num = int(is_enough.argmax()) + 1 if is_enough.any() else slots.size
        cosines, slots = cosines[:num], slots[:num]
        cosines, slots = cosines[~hidden[slots]], slots[~hidden[slots]]
        if slots.size >= num_nearest and cosines[-1] >= SAME_COSINE:
            # All are of this prompt. Among equals the index always finds the same ones, so newer
            # answers would be ignored.
            is_same = self._prompts[: len(self)] == _prompt_numbers(vector[np.newaxis])[0]
            is_same[slots] = True
            is_same &= ~hidden
            every = np.flatnonzero(is_same)
            slots = every[np.argpartition(-self._stamps[every], slots.size - 1)[: slots.size]]
        return cosines, slots

    def vectors(self, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of the vectors, shape (len(slots), embedding_dimension + num_features)."""
        return np.hstack([embeddings(self._index.codes(slots)), self.features[slots]])

    def described(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the inputs of a LengthScore, one row each."""
        return vectors if self.general is None else self.general.described(vectors)

    def fitting(self) -> Fitting | None:
        """Return the fit of a score to the newest records; None if too few are new since the last
        fit."""
        if self._num_unfitted <= _REFIT_SHARE * len(self):
            return None
        self._num_unfitted = 0
        ended = np.flatnonzero(~self.unfinished[: len(self)])
        own = ended[~self.limited[ended]]
        if np.unique(self._prompts[own]).size >= MIN_PROMPTS:
            ended = own
        slots = ended[np.argsort(-self._stamps[ended], kind="stable")[:_MAX_FITTED]]
        codes, features = self._index.codes(slots), self.features[slots]
        lengths, prompts = self.lengths[slots], self._prompts[slots]

        def fit() -> Fitted:
            vectors = np.hstack([embeddings(codes), features])
            return LengthScore.fit(self.described(vectors), lengths, prompts)

        return Fitting(slots, self._stamps[slots], fit)

    def install(self, fitting: Fitting, fitted: Fitted) -> None:
        """Take over the result of Fitting.fit. None changes nothing."""
        if fitted is None:
            return
        self.score, held_out = fitted
        same = self._stamps[fitting.slots] == fitting.stamps
        self.scores[fitting.slots[same]] = held_out[same]
        rest = np.setdiff1d(np.arange(len(self)), fitting.slots[same])
        self.scores[rest] = self.score.of(self.described(self.vectors(rest)))

    def fit(self) -> None:
        """Fit a score at once. Takes 0.3 s at 10,000 records."""
        if (fitting := self.fitting()) is not None:
            self.install(fitting, fitting.fit())

    def _append(self, records: Sequence[Record], *, unfinished: bool = False) -> None:
        vectors = self._write(len(self), records, unfinished=unfinished)
        self._index.add(vectors[:, : self._dimension])

    def _write(
        self, first: int, records: Sequence[Record], *, unfinished: bool
    ) -> NDArray[np.float32]:
        """Write records, oldest first, into all arrays from this slot on. Return their vectors."""
        vectors = np.stack([record.vector for record in records])
        self._write_answers(first, records, vectors)
        slots = slice(first, first + len(records))
        self.unfinished[slots] = unfinished
        self.warm[slots] = [record.origin == "warm" for record in records]
        self.kinds[slots] = self.kinds_of(vectors)
        self.features[slots] = vectors[:, self._dimension :]
        self._prompts[slots] = prompts = _prompt_numbers(vectors)
        self._num_of_prompt.update(prompts)
        if self.score is not None:
            self.scores[slots] = self.score.of(self.described(vectors))
        self._stamps[slots] = range(self._num_added + 1, self._num_added + 1 + len(records))
        self._num_added += len(records)
        self._num_unfitted += 0 if unfinished else len(records)
        for slot, record in enumerate(records, first):
            (self._oldest_warm if record.origin == "warm" else self._oldest_history).append(slot)
        return vectors

    def _write_answers(
        self, first: int, records: Sequence[Record], vectors: NDArray[np.float32]
    ) -> None:
        slots = slice(first, first + len(records))
        scopes = [asked.Scope.read(record.scope) for record in records]
        limited = np.array([scope.end != asked.OWN for scope in scopes])
        self.excess[slots] = self._excess(records, vectors, limited)
        self.lengths[slots] = [record.output_tokens for record in records]
        self.censored[slots] = [record.censored for record in records]
        self.scopes[slots] = [self.number_of(scope.adapter) for scope in scopes]
        self.limits[slots] = [self.number_of(scope.limits) for scope in scopes]
        self.limited[slots] = limited
        self.shaped[slots] = [scope.end == asked.SHAPED for scope in scopes]

    def _excess(
        self,
        records: Sequence[Record],
        vectors: NDArray[np.float32],
        limited: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        if self.general is None:
            return np.zeros(len(records))
        logs = np.log([max(record.output_tokens, 1) for record in records])
        excess: NDArray[np.float64] = logs - self.general.of(vectors)
        if not any(record.censored for record in records):
            return excess
        # An answer that its limits ended would have been longer.
        known = self.excess[: len(self)][~self.limited[: len(self)]]
        total, num = float(known.sum()), known.size
        for i, record in enumerate(records):
            if record.censored:
                excess[i] = max(excess[i], self.general.level_after(total, num))
            if not limited[i]:
                total, num = total + excess[i], num + 1
        return excess


def _prompt_numbers(vectors: NDArray[np.float32]) -> list[int]:
    # A prompt's vectors differ in their last bits with the batch that it was embedded in. With this
    # rounding, one in a thousand pairs gets different numbers. A fit sums prompts in the order of
    # their numbers, so these must not differ between processes, as Python's own hashes do.
    rounded = np.round(vectors[:, :16] * 100).astype(np.int8)
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rounded]
    return [int.from_bytes(digest, signed=True) for digest in digests]
