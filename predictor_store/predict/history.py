"""Past answers in memory: vectors in an index, lengths beside them, first in first out."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import asked
from predictor_store.predict.embedder import NUM_BESIDE, embedding_dimension, searched_columns
from predictor_store.predict.index import Codes, VectorIndex
from predictor_store.predict.regression import PRIOR_WORTH, GeneralLength, LengthScore
from predictor_store.store.file import Origin

# A score is fitted to the newest records, this many at most: more only take longer.
_MAX_FITTED = 20_000
# It is fitted anew when this share of the history is new.
_REFIT_SHARE = 0.05
# The vectors of one prompt, give or take a number or a name in it.
SAME_COSINE = 0.99
# Scales what a prompt adds to lengths in general, beside the numbers of its vector.
_GENERAL_SCALE = 3.5
_NO_SCOPE = -1


class Place(NamedTuple):
    """Where a record is, and which one it is, as it may have made room for another."""

    slot: int
    stamp: int


class Fitting(NamedTuple):
    """A copy of what a fit needs, so that it can run while the history is used.

    slots, stamps: int64, of the records, see Place. codes: see VectorIndex.codes; decoded by the
    fit.
    """

    slots: NDArray[np.int64]
    stamps: NDArray[np.int64]
    codes: Codes
    features: NDArray[np.float32]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]
    general: GeneralLength | None

    def fit(self) -> tuple[LengthScore, NDArray[np.float64]] | None:
        """LengthScore.fit. Touches no history, so that any thread may run it."""
        vectors = np.hstack([self.codes.embeddings(), self.features])
        return LengthScore.fit(_described(vectors, self.general), self.lengths, self.prompts)


class History:
    """Up to capacity records. Warm ones make room first, so that they fade as real ones come.

    Arrays by slot, of shape (capacity,), in use from 0 to len(self) - 1: lengths, int64; censored
    and warm, bool; scopes, int64, see scope(); kinds, int64, see asked.kind_of; scores, float64,
    see LengthScore; features, float32, of shape (capacity, num_features); num_of_same_prompt,
    int64, how many records there are of a record's prompt; excess, float64, see
    GeneralLength.level_after; unfinished, bool: the answer goes on, so that it is censored, and no
    score is fitted to it.
    """

    def __init__(
        self,
        embedding_dimension: int,
        num_features: int,
        capacity: int,
        general: GeneralLength | None = None,
        columns: NDArray[np.int64] | None = None,
    ) -> None:
        """Vectors are an embedding, of unit length, and then features. general: None if nothing is
        known of lengths in general. columns: see VectorIndex."""
        self.capacity = capacity
        self.lengths = np.zeros(capacity, np.int64)
        self.censored = np.zeros(capacity, np.bool_)
        self.unfinished = np.zeros(capacity, np.bool_)
        self.warm = np.zeros(capacity, np.bool_)
        self.scopes = np.zeros(capacity, np.int64)
        self.kinds = np.zeros(capacity, np.int64)
        self.scores = np.zeros(capacity, np.float64)
        self.general = general
        self.score = _general_score(general)
        self.excess = np.zeros(capacity, np.float64)
        self.features = np.zeros((capacity, num_features), np.float32)
        self._prompts = np.zeros(capacity, np.int64)
        self._slots_of_prompt: defaultdict[int, set[int]] = defaultdict(set)
        self.num_of_same_prompt = np.zeros(capacity, np.int64)
        # Of the scopes that records have, and of some that records had.
        self._scope_numbers: dict[str, int] = {}
        self._num_scopes = 0
        self._dimension = embedding_dimension
        self._index = VectorIndex(embedding_dimension, columns)
        self._oldest_warm: deque[int] = deque()
        self._oldest_history: deque[int] = deque()
        self._stamps = np.zeros(capacity, np.int64)
        self._num_added = 0
        self._num_unfitted = 0

    @classmethod
    def of_encoder(cls, encoder: str, capacity: int, general: GeneralLength | None) -> Self:
        """For the vectors of predictor_store.predict.embedder."""
        dimension, columns = embedding_dimension(encoder), searched_columns(encoder)
        return cls(dimension, NUM_BESIDE, capacity, general, columns)

    def __len__(self) -> int:
        return len(self._index)

    def scope(self, name: str) -> int:
        """The number of the traffic of this name, such as that of one LoRA adapter. _NO_SCOPE if it
        has no record."""
        return self._scope_numbers.get(name, _NO_SCOPE)

    def kind(self, vector: NDArray[np.float32]) -> int:
        """What kind of request a prompt's vector is of."""
        if self.features.shape[1] < asked.NUM_FEATURES:
            return 0
        return asked.kind_of(vector[-asked.NUM_FEATURES :])

    def add(
        self,
        vector: NDArray[np.float32],
        output_tokens: int,
        censored: bool,
        origin: Origin,
        scope: str = "",
        unfinished: bool = False,
    ) -> Place | None:
        """At capacity, the oldest warm record makes room, or else the oldest. A warm record is not
        added if only history could make room for it: None.

        vector: float32, shape (embedding_dimension + num_features,). unfinished: it will be
        amended, and is censored till then.
        """
        warm = origin == "warm"
        embedding = vector[: self._dimension]
        excess = self._excess(vector, output_tokens, censored)
        if len(self) < self.capacity:
            slot = len(self)
            self._index.add(embedding)
        elif self._oldest_warm or not warm:
            slot = (self._oldest_warm or self._oldest_history).popleft()
            self._index.replace(slot, embedding)
            self._leave_prompt(slot)
        else:
            return None
        self.lengths[slot] = output_tokens
        self.censored[slot] = censored
        self.unfinished[slot] = unfinished
        self.warm[slot] = warm
        self.scopes[slot] = self._number_scope(scope)
        self.kinds[slot] = self.kind(vector)
        self.features[slot] = vector[self._dimension :]
        self._join_prompt(slot, _prompt_number(vector))
        if self.score is not None:
            self.scores[slot] = self.score.of(self.described(vector[np.newaxis]))[0]
        self.excess[slot] = excess
        self._num_added += 1
        self._num_unfitted += not unfinished
        self._stamps[slot] = self._num_added
        (self._oldest_warm if warm else self._oldest_history).append(slot)
        return Place(slot, self._num_added)

    def amend(
        self,
        place: Place,
        vector: NDArray[np.float32],
        output_tokens: int,
        censored: bool,
        unfinished: bool = False,
    ) -> bool:
        """The answer has become this long. False if the record has made room since."""
        slot, stamp = place
        if self._stamps[slot] != stamp:
            return False
        self.excess[slot] = self._excess(vector, output_tokens, censored)
        self.lengths[slot] = output_tokens
        self.censored[slot] = censored
        self._num_unfitted += bool(self.unfinished[slot]) and not unfinished
        self.unfinished[slot] = unfinished
        return True

    def nearest(
        self, vector: NDArray[np.float32], num_nearest: int, among: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Cosines, float32, falling, and slots, int64: num_nearest each, or as many as there are.
        If more records than that are of this very prompt, the newest of them.

        among: bool, shape (len(self),), the slots to search.
        """
        embedding = vector[: self._dimension]
        cosines, slots = self._index.nearest(embedding, num_nearest, among)
        if slots.size == num_nearest and cosines[-1] >= SAME_COSINE:
            slots = self._newest_of_prompt(vector, slots, among)
        return cosines, slots

    def _newest_of_prompt(
        self,
        vector: NDArray[np.float32],
        slots: NDArray[np.int64],
        among: NDArray[np.bool_] | None,
    ) -> NDArray[np.int64]:
        """The newest of the prompt's slots, as many as slots, which all are of it. The index always
        finds the same ones among equals, so that newer answers would be ignored."""
        same = self._slots_of_prompt.get(_prompt_number(vector), set())
        every = np.union1d(slots, np.fromiter(same, np.int64, len(same)))
        if among is not None:
            every = every[among[every]]
        newest = np.argpartition(-self._stamps[every], slots.size - 1)[: slots.size]
        return every[newest]

    def vectors(self, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """A copy, shape (len(slots), embedding_dimension + num_features)."""
        return np.hstack([self._index.codes(slots).embeddings(), self.features[slots]])

    def described(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """What a LengthScore reads: the vectors, a row each, and what their prompts add to lengths
        in general, if that is known."""
        return _described(vectors, self.general)

    def fitting(self) -> Fitting | None:
        """What to fit a score to; None if too little is new since the last fit."""
        if self._num_unfitted <= _REFIT_SHARE * len(self):
            return None
        self._num_unfitted = 0
        ended = np.flatnonzero(~self.unfinished[: len(self)])
        slots = ended[np.argsort(-self._stamps[ended], kind="stable")[:_MAX_FITTED]]
        return Fitting(
            slots,
            self._stamps[slots],
            self._index.codes(slots),
            self.features[slots],
            self.lengths[slots],
            self._prompts[slots],
            self.general,
        )

    def install(
        self, fitting: Fitting, fitted: tuple[LengthScore, NDArray[np.float64]] | None
    ) -> None:
        """What Fitting.fit made of fitting(); None changes nothing."""
        if fitted is None:
            return
        self.score, held_out = fitted
        same = self._stamps[fitting.slots] == fitting.stamps
        self.scores[fitting.slots[same]] = held_out[same]
        rest = np.setdiff1d(np.arange(len(self)), fitting.slots[same])
        self.scores[rest] = self.score.of(self.described(self.vectors(rest)))

    def fit(self) -> None:
        """At once, for a history that will not grow. Takes 0.3 s at 10,000 records."""
        if (fitting := self.fitting()) is not None:
            self.install(fitting, fitting.fit())

    def _excess(self, vector: NDArray[np.float32], output_tokens: int, censored: bool) -> float:
        if self.general is None:
            return 0.0
        added = float(self.general.of(vector[np.newaxis])[0])
        excess = float(np.log(max(output_tokens, 1))) - added
        # A cut answer would have been longer.
        known = self.excess[: len(self)]
        return max(excess, self.general.level_after(known)) if censored else excess

    def _number_scope(self, name: str) -> int:
        if name not in self._scope_numbers:
            if len(self._scope_numbers) >= 2 * self.capacity:
                used = {*self.scopes[: len(self)].tolist()}
                known = self._scope_numbers.items()
                self._scope_numbers = {name: number for name, number in known if number in used}
            self._scope_numbers[name] = self._num_scopes
            self._num_scopes += 1
        return self._scope_numbers[name]

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


def _described(vectors: NDArray[np.float32], general: GeneralLength | None) -> NDArray[np.float32]:
    if general is None:
        return vectors
    added = _GENERAL_SCALE * general.of(vectors).astype(np.float32)
    return np.concatenate([vectors, added[:, np.newaxis]], axis=1)


def _general_score(general: GeneralLength | None) -> LengthScore | None:
    """The score until there is enough to fit one to."""
    if general is None:
        return None
    weights = np.zeros(general.weights.size + 2)
    weights[-2] = 1 / _GENERAL_SCALE  # of what the prompt adds; the last is the constant
    return LengthScore(weights, general.level, general.spread, PRIOR_WORTH)


def _prompt_number(vector: NDArray[np.float32]) -> int:
    # A prompt's vectors differ in their last bits by the batch that it was embedded in. Rounded so,
    # one in a thousand pairs comes apart. A fit sums prompts in the order of their numbers, so
    # these must not differ between processes, as Python's own hashes do.
    rounded = np.round(vector[:16] * 100).astype(np.int8)
    digest = hashlib.blake2b(rounded.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
