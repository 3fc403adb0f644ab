"""From similar past prompts to the distribution of an answer's length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor_store.history import History
from sage_sched.config import PredictorConfig
from sage_sched.distribution import LengthDistribution, Source


def predict(
    history: History, vector: NDArray[np.float32], config: PredictorConfig
) -> LengthDistribution | None:
    """By the first of these that has config.min_matches records; None where there are none at all.

    1. The history's records of at least config.threshold cosine similarity (SageSched section
       3.1), alike in weight.
    2. The warm ones besides (there: augmentation).
    3. The config.num_nearest nearest of all, weighted by similarity: on diverse traffic hardly
       any prompt has a neighbour as near as the threshold.
    """
    matches = history.matches(vector, config.threshold)
    of_history = matches[~history.warm[matches]]
    source: Source
    if of_history.size >= config.min_matches:
        slots, weights, source = of_history, None, "history"
    elif matches.size >= config.min_matches:
        slots, weights, source = matches, None, "warm"
    else:
        cosines, slots = history.nearest(vector, config.num_nearest)
        weights, source = _kernel(cosines), "nearest"
    return _distribution(history, slots, weights, source, config)


def prior(history: History, config: PredictorConfig) -> LengthDistribution | None:
    """Of all records alike; None where there are none."""
    return _distribution(history, np.arange(len(history)), None, "prior", config)


def _kernel(cosines: NDArray[np.float32]) -> NDArray[np.float64]:
    # Anything between cosine and its fourth power does as well, steeper ones lose (leave-one-out
    # CRPS on instruction data). Never 0: where all are far away, they are all there is.
    return np.square(np.maximum(cosines, 0.01).astype(np.float64))


def _distribution(
    history: History,
    slots: NDArray[np.int64],
    weights: NDArray[np.float64] | None,
    source: Source,
    config: PredictorConfig,
) -> LengthDistribution | None:
    if slots.size == 0:
        return None
    found = LengthDistribution.from_samples(
        history.lengths[slots], source, weights, history.censored[slots]
    )
    return found.compressed(config.max_atoms)
