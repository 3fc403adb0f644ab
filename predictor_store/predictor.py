"""From similar past prompts to the distribution of an answer's length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor_store.history import History
from predictor_store.length_score import PRIOR_WORTH
from sage_sched.config import PredictorConfig
from sage_sched.distribution import LengthDistribution, Source

# The vectors of one prompt, give or take a number or a name in it.
_SAME_COSINE = 0.99
# How fast weight falls with distance in meaning, for the near and for the wide neighbourhood, and
# how many near records weigh as much as the wide ones.
_NEAR_SLOPE, _WIDE_SLOPE = 15.0, 5.0
_WIDE_WORTH = 16.0
# How fast with distance in score, in shares of the score's error; slower where fewer than so many
# are that near, or an outlier would take a stranger's length for its own.
_SCORE_SHARE = 0.3
_NUM_IN_SCORE = 8
# So many alike records of this server's own weigh as much as all that are not its own.
_FOREIGN_WORTH = 32.0


def predict(
    history: History, vector: NDArray[np.float32], config: PredictorConfig, scope: str = ""
) -> LengthDistribution | None:
    """By config.rule; None where there are no records at all. scope: see History.scope.

    neighbours: the config.num_nearest nearest, by _weights.
    threshold: those of at least config.threshold cosine, alike in weight: of the history's own
    (SageSched section 3.1), with fewer than config.min_matches of them the warm ones besides
    (there: augmentation), with fewer still all records.
    """
    own = history.scope(scope)
    among = None
    if config.isolate:
        size = len(history)
        among = history.warm[:size] | (history.scopes[:size] == own)
    cosines, slots = history.nearest(vector, config.num_nearest, among)
    if slots.size == 0:
        return None
    if config.rule == "threshold":
        return _of_matches(history, slots[cosines >= config.threshold], config)
    foreign = history.warm[slots] | (history.scopes[slots] != own)
    weights = _weights(history, vector, cosines.astype(np.float64), slots, foreign)
    source: Source = "warm" if weights[foreign].sum() > weights.sum() / 2 else "history"
    return distribution(history, slots, weights, source, config)


def prior(history: History, config: PredictorConfig) -> LengthDistribution | None:
    """Of all records alike; None where there are none."""
    return distribution(history, np.arange(len(history)), None, "prior", config)


def _of_matches(
    history: History, matches: NDArray[np.int64], config: PredictorConfig
) -> LengthDistribution | None:
    of_history = matches[~history.warm[matches]]
    if of_history.size >= config.min_matches:
        return distribution(history, of_history, None, "history", config)
    if matches.size >= config.min_matches:
        return distribution(history, matches, None, "warm", config)
    return prior(history, config)


def _weights(
    history: History,
    vector: NDArray[np.float32],
    cosines: NDArray[np.float64],
    slots: NDArray[np.int64],
    foreign: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Three neighbourhoods, each as far as its evidence goes, then the next wider: the same
    prompt; prompts near in meaning and in score; prompts less near in meaning.

    Records of one prompt share weight, so that one prompt asked a hundred times is not a hundred
    neighbours. All constants: the best or next to it on each of six datasets (docs/predictor.md).
    """
    same = cosines >= _SAME_COSINE
    alike = 1 / np.sqrt(history.num_of_same_prompt[slots])
    rest_worth = PRIOR_WORTH
    if history.score is not None:
        rest_worth = history.score.rest_worth
        distance = np.abs(history.scores[slots] - history.score.of(vector[np.newaxis]))
        last = min(_NUM_IN_SCORE, distance.size) - 1
        width = max(_SCORE_SHARE * history.score.spread, float(np.partition(distance, last)[last]))
        # Not 0: nearness in meaning tells the far ones apart.
        alike *= np.maximum(np.exp(-0.5 * np.square(distance / width)), 1e-9)
    alike[same] = 0.0
    wide = alike * np.exp(_WIDE_SLOPE * cosines)
    fading = np.where(foreign, _FOREIGN_WORTH / (_FOREIGN_WORTH + _worth(wide[~foreign])), 1.0)
    near = alike * np.exp(_NEAR_SLOPE * cosines)
    others = _after(near * fading, wide * fading, _WIDE_WORTH)
    return _after(same.astype(float) * fading, others, rest_worth)


def _after(
    first: NDArray[np.float64], rest: NDArray[np.float64], rest_worth: float
) -> NDArray[np.float64]:
    """first, and rest as if it were rest_worth samples; in all 1, or 0 where both are."""
    share = rest_worth / (_worth(first) + rest_worth) if rest.any() else 0.0
    mixed = np.zeros(first.size)
    for weights, part in ((first, 1 - share), (rest, share)):
        if weights.any():
            mixed += part * weights / weights.sum()
    return mixed


def _worth(weights: NDArray[np.float64]) -> float:
    """Of how many samples of equal weight (Kish)."""
    total = float(weights.sum())
    return total**2 / float(np.square(weights).sum()) if total > 0 else 0.0


def distribution(
    history: History,
    slots: NDArray[np.int64],
    weights: NDArray[np.float64] | None,
    source: Source,
    config: PredictorConfig,
) -> LengthDistribution | None:
    """Of the records in these slots; weights: shape (len(slots),), None where all weigh alike.
    None where there are no slots."""
    if slots.size == 0:
        return None
    found = LengthDistribution.from_samples(
        history.lengths[slots], source, weights, history.censored[slots]
    )
    return found.compressed(config.max_atoms)
