"""Predicts by the rule of the predictor in SageSched's paper."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import predictor
from predictor_store.predict.history import History
from sage_sched.distribution import LengthDistribution

# The paper does not say how few similar prompts are too few.
_FEWEST_MATCHES = 8


def predict_by_threshold(
    history: History, vector: NDArray[np.float32], cosine: float
) -> LengthDistribution | None:
    """Return the distribution of answers to prompts of at least this cosine, all with the same
    weight (section 3.1).

    If too few prompts match, warm records (in the paper, requests of public datasets) are searched
    too. If still too few match, all records are used. Return None if there are no records.
    """
    cosines, slots = history.nearest(vector, max(1, len(history)))
    matches = slots[cosines >= cosine]
    own = matches[~history.warm[matches]]
    if own.size >= _FEWEST_MATCHES:
        return predictor.distribution(history, own, np.ones(own.size), "history")
    if matches.size >= _FEWEST_MATCHES:
        return predictor.distribution(history, matches, np.ones(matches.size), "warm")
    return predictor.distribution(history, slots, np.ones(slots.size), "prior")
