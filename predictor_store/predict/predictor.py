"""Predicts the distribution of an answer's length from similar past prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict.asked import Scope
from predictor_store.predict.history import SAME_COSINE, History
from predictor_store.predict.regression import PRIOR_WORTH, LengthScore
from sage_sched.distribution import LengthDistribution, Source

# A prediction uses this many past prompts, the most similar ones.
NUM_NEAREST = 256
# The maximum number of distinct lengths that are sent with a request.
MAX_ATOMS = 64
# How fast weight falls with distance in meaning, in the near and in the wide neighbourhood.
# _WIDE_WORTH: how many near records weigh as much as all wide ones.
_NEAR_SLOPE, _WIDE_SLOPE = 15.0, 5.0
_WIDE_WORTH = 16.0
# How fast weight falls with distance in score, as a share of the score's error. It falls more
# slowly if fewer than _NUM_IN_SCORE records are that near. Otherwise one unrelated record would
# decide the prediction for an outlier.
_SCORE_SHARE = 0.3
_NUM_IN_SCORE = 8
# This many similar records of this server weigh as much as all records from elsewhere.
_FOREIGN_WORTH = 32.0
# This many answers of the same session weigh as much as everything else.
_SESSION_WORTH = 16.0
# This many records of the same kind (asked.kinds_of) weigh as much as all records of other kinds.
_OTHER_WORTH = 4.0
# This many similar records weigh as much as general lengths. If general lengths would weigh next to
# nothing, they are left out.
_GENERAL_WORTH = 8.0
_LEAST_GENERAL = 0.01


class GeneralPart(NamedTuple):
    """General lengths (GeneralLength), equally likely, shape (n,), and their share."""

    lengths: NDArray[np.int64]
    share: float


def predict(
    history: History, vector: NDArray[np.float32], scope: str = ""
) -> LengthDistribution | None:
    """Return the prediction from the NUM_NEAREST nearest records, weighted by _weights, and from
    general lengths; None if there are neither.

    scope: the name of an asked.Scope. An answer with other limits counts as complete only if it
        ended by itself.
    """
    of = Scope.read(scope)
    adapter, limits = history.number_of(of.adapter), history.number_of(of.limits)
    strange = history.strange(limits)
    hidden = strange & history.shaped[: len(history)]
    cut = history.censored[: len(history)] | strange
    cosines, slots = history.nearest(vector, NUM_NEAREST, cut, hidden)
    foreign = history.warm[slots] | (history.scopes[slots] != adapter)
    if of.limits:  # otherwise all remaining records help
        foreign |= history.limits[slots] != limits
    weights, share = _weights(history, vector, cosines.astype(np.float64), slots, foreign)
    source: Source = "warm" if weights[foreign].sum() > weights.sum() / 2 else "history"
    cut = cut[slots]
    if share < _LEAST_GENERAL or history.general is None:
        return distribution(history, slots, weights, source, cut=cut)
    added = float(history.general.of(vector[np.newaxis])[0])
    excess = history.excess[: len(history)][~strange]
    general = GeneralPart(history.general.lengths(added, excess), share)
    source = source if share <= 0.5 else "general"
    return distribution(history, slots, weights, source, general, cut)


def within_session(said: LengthDistribution, lengths: Sequence[int]) -> LengthDistribution:
    """Return a prediction mixed with the lengths of the session's last answers, in tokens."""
    if not lengths:
        return said
    own = LengthDistribution.from_samples(lengths, "history")
    rest = _SESSION_WORTH / (_SESSION_WORTH + len(lengths))
    return said.mixed(own, 1 - rest).compressed(MAX_ATOMS)


def prior(history: History) -> LengthDistribution | None:
    """Return the distribution for any prompt: all records, equally weighted, and general lengths.

    None if there are neither. Answers that limits have ended count as cut off, unless there are no
    others.
    """
    strange = history.strange(history.number_of(""))
    if strange.all():
        strange = np.zeros(len(history), np.bool_)
    slots = np.flatnonzero(~(strange & history.shaped[: len(history)]))
    cut = history.censored[slots] | strange[slots]
    general = None
    if history.general is not None:
        share = _GENERAL_WORTH / (_GENERAL_WORTH + slots.size)
        general = GeneralPart(history.general.of_any_prompt(), share)
    return distribution(history, slots, np.ones(slots.size), "prior", general, cut)


def _weights(
    history: History,
    vector: NDArray[np.float32],
    cosines: NDArray[np.float64],
    slots: NDArray[np.int64],
    foreign: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], float]:
    """Return the records' weights, and the weight of general lengths. Their sum is 1, or 0 if there
    are neither.

    There are four neighbourhoods, from narrow to wide: the same prompt, prompts near in meaning and
    in score, prompts less near in meaning, and all prompts. Each weighs in proportion to its
    evidence. Records of one prompt share their weight: a prompt that was asked a hundred times is
    one neighbour. Each constant is the best or nearly the best one on each of six datasets
    (docs/predictor.md).
    """
    same = cosines >= SAME_COSINE
    alike = 1 / np.sqrt(history.num_of_same_prompt(slots))
    rest_worth = PRIOR_WORTH
    if history.score is not None:
        rest_worth = history.score.rest_worth
        alike *= _nearness_in_score(history, history.score, vector, slots)
    alike[same] = 0.0
    wide = alike * np.exp(_WIDE_SLOPE * cosines)
    near = alike * np.exp(_NEAR_SLOPE * cosines)
    neighbourhoods = np.stack([same, near, wide])
    other = history.kinds[slots] != history.kinds_of(vector[np.newaxis])
    for apart, worth in ((foreign, _FOREIGN_WORTH), (other, _OTHER_WORTH)):
        if apart.any():
            own_worth = float(_worths(np.stack([same, wide])[:, ~apart]).sum())
            neighbourhoods *= np.where(apart, worth / (worth + own_worth), 1.0)
    anywhere = history.general is not None
    return _combined(neighbourhoods, (rest_worth, _WIDE_WORTH, _GENERAL_WORTH), anywhere)


def _nearness_in_score(
    history: History, score: LengthScore, vector: NDArray[np.float32], slots: NDArray[np.int64]
) -> NDArray[np.float64]:
    if slots.size == 0:
        return np.empty(0)
    distance = np.abs(history.scores[slots] - score.of(history.described(vector[np.newaxis])))
    last = min(_NUM_IN_SCORE, distance.size) - 1
    width = max(_SCORE_SHARE * score.spread, float(np.partition(distance, last)[last]))
    # Above 0, so that nearness in meaning still distinguishes records that are far in score.
    return np.maximum(np.exp(-0.5 * np.square(distance / width)), 1e-9)


def _combined(
    neighbourhoods: NDArray[np.float64], rest_worths: tuple[float, ...], anywhere: bool
) -> tuple[NDArray[np.float64], float]:
    """Return the weights of all records, and the weight of general lengths, which come last.

    neighbourhoods: shape (m, n); one without weight is skipped.
    rest_worths: for each, how many samples all later neighbourhoods together are worth.
    anywhere: whether general lengths come last.
    """
    sums, worths = neighbourhoods.sum(1), _worths(neighbourhoods)
    is_last = [not anywhere and not sums[i + 1 :].any() for i in range(len(sums))]
    left, factors = 1.0, np.zeros(len(sums))
    for i, (total, rest_worth) in enumerate(zip(sums, rest_worths, strict=True)):
        if total > 0:
            rest = 0.0 if is_last[i] else left * rest_worth / (worths[i] + rest_worth)
            factors[i] = (left - rest) / total
            left = rest
    return factors @ neighbourhoods, left if anywhere else 0.0


def _worths(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how many samples of equal weight each row is worth (Kish)."""
    squares = np.einsum("ij,ij->i", weights, weights)
    return np.asarray(np.square(weights.sum(1)) / np.where(squares > 0, squares, 1.0), np.float64)


def distribution(
    history: History,
    slots: NDArray[np.int64],
    weights: NDArray[np.float64],
    source: Source,
    general: GeneralPart | None = None,
    cut: NDArray[np.bool_] | None = None,
) -> LengthDistribution | None:
    """Return the distribution of the records in these slots, mixed with general lengths; None if
    there are neither.

    weights, cut (answers that would have been longer): shape (len(slots),).
    """
    lengths, censored = history.lengths[slots], history.censored[slots] if cut is None else cut
    if general is not None:
        num = general.lengths.size
        lengths = np.append(lengths, general.lengths)
        censored = np.append(censored, np.zeros(num, np.bool_))
        weights = weights * ((1 - general.share) / (weights.sum() or 1.0))
        weights = np.append(weights, np.full(num, general.share / num))
    if lengths.size == 0:
        return None
    found = LengthDistribution.from_samples(lengths, source, weights, censored)
    return found.compressed(MAX_ATOMS)
