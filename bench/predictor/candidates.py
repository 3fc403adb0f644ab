"""Predictors that the default one is held against. All see the same history."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.workloads.foresight import of_all_records, of_threshold
from predictor_store.predict import predictor
from predictor_store.predict.history import History
from sage_sched.distribution import LengthDistribution

Candidate = Callable[[History, NDArray[np.float32]], LengthDistribution | None]

BLIND = "no prediction"
THRESHOLD = "cosine >= 0.8 (the paper)"
DEFAULT = "neighbours (default)"


def _nearest(number: int) -> Candidate:
    def predict(history: History, vector: NDArray[np.float32]) -> LengthDistribution | None:
        _, slots = history.nearest(vector, number)
        return _of(history, slots)

    return predict


def _kernel(slope: float) -> Candidate:
    def predict(history: History, vector: NDArray[np.float32]) -> LengthDistribution | None:
        cosines, slots = history.nearest(vector, predictor.NUM_NEAREST)
        return _of(history, slots, np.exp(slope * cosines.astype(float)))

    return predict


def _score(history: History, vector: NDArray[np.float32]) -> LengthDistribution | None:
    if history.score is None:
        return of_all_records(history)
    slots = np.arange(len(history))
    distance = history.scores[slots] - history.score.of(history.described(vector[np.newaxis]))
    nearness = np.exp(-0.5 * np.square(distance / 0.3 / history.score.spread))
    return _of(history, slots, np.maximum(nearness, 1e-12))


def _head(history: History, vector: NDArray[np.float32]) -> LengthDistribution | None:
    """The regression's prediction times the factors by which it was wrong."""
    if history.score is None:
        return of_all_records(history)
    size = len(history)
    score = history.score.of(history.described(vector[np.newaxis]))
    factors = np.exp(score - history.scores[:size])
    lengths = np.clip(np.rint(history.lengths[:size] * factors), 1, 2**30).astype(np.int64)
    return LengthDistribution.from_samples(lengths, "warm").compressed(predictor.MAX_ATOMS)


def _input_length(history: History, vector: NDArray[np.float32]) -> LengthDistribution | None:
    """Of the 32 records of the nearest prompt length (SageSched, Fig. 9: length-only history)."""
    # The first of the features.
    of_length = history.features[: len(history), 0]
    distance = np.abs(of_length - vector[-history.features.shape[1]])
    slots = np.argsort(distance, kind="stable")[:32]
    return _of(history, slots)


def _of(
    history: History, slots: NDArray[np.int64], weights: NDArray[np.float64] | None = None
) -> LengthDistribution | None:
    weights = np.ones(slots.size) if weights is None else weights
    return predictor.distribution(history, slots, weights, "warm")


CANDIDATES: dict[str, Candidate] = {
    BLIND: lambda history, vector: of_all_records(history),
    "input length": _input_length,
    THRESHOLD: of_threshold,
    "20 nearest": _nearest(20),
    "50 nearest": _nearest(50),
    "kernel, exp(10 cos)": _kernel(10.0),
    "kernel, exp(20 cos)": _kernel(20.0),
    "like score": _score,
    "regression and its errors": _head,
    DEFAULT: predictor.predict,
}
