"""Fitting a LengthScore to a history's records, in any thread."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict.index import Codes
from predictor_store.predict.regression import PRIOR_WORTH, GeneralLength, LengthScore

# Scales what a prompt adds to lengths in general, beside the numbers of its vector.
_GENERAL_SCALE = 3.5


class Fitting(NamedTuple):
    """A copy of the records to fit to, so that the history can be used meanwhile.

    slots, stamps: int64, of the records, see history.Place. codes: see VectorIndex.codes; decoded
    by the fit.
    """

    slots: NDArray[np.int64]
    stamps: NDArray[np.int64]
    codes: Codes
    features: NDArray[np.float32]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]
    general: GeneralLength | None

    def fit(self) -> tuple[LengthScore, NDArray[np.float64]] | None:
        """LengthScore.fit of the records."""
        vectors = np.hstack([self.codes.embeddings(), self.features])
        return LengthScore.fit(described(vectors, self.general), self.lengths, self.prompts)


def described(vectors: NDArray[np.float32], general: GeneralLength | None) -> NDArray[np.float32]:
    """What a LengthScore reads: the vectors, a row each, and what their prompts add to lengths in
    general, if that is known."""
    if general is None:
        return vectors
    added = _GENERAL_SCALE * general.of(vectors).astype(np.float32)
    return np.concatenate([vectors, added[:, np.newaxis]], axis=1)


def first_score(general: GeneralLength | None) -> LengthScore | None:
    """The score until there is enough to fit one to."""
    if general is None:
        return None
    weights = np.zeros(general.weights.size + 2)
    weights[-2] = 1 / _GENERAL_SCALE  # of what the prompt adds; the last is the constant
    return LengthScore(weights, general.level, general.spread, PRIOR_WORTH)
