"""Lists the default predictor and its rivals, which all have the same history."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.workloads.predictors import of_all_records
from predictor_store.predict import predictor
from predictor_store.predict.history import History
from predictor_store.predict.threshold import predict_by_threshold
from sage_sched.distribution import LengthDistribution

Candidate = Callable[[History, NDArray[np.float32]], LengthDistribution | None]

BLIND = "no prediction"
THRESHOLD = "cosine >= 0.8 (the paper)"
DEFAULT = "neighbours (default)"


def _input_length(history: History, vector: NDArray[np.float32]) -> LengthDistribution | None:
    """Return the distribution of the 32 records of the nearest prompt length (SageSched, Fig. 9:
    length-only history)."""
    # The first feature is the prompt's length.
    of_length = history.features[: len(history), 0]
    distance = np.abs(of_length - vector[-history.features.shape[1]])
    slots = np.argsort(distance, kind="stable")[:32]
    return predictor.distribution(history, slots, np.ones(slots.size), "warm")


CANDIDATES: dict[str, Candidate] = {
    BLIND: lambda history, vector: of_all_records(history),
    "input length": _input_length,
    THRESHOLD: lambda history, vector: predict_by_threshold(history, vector, 0.8),
    DEFAULT: predictor.predict,
}
