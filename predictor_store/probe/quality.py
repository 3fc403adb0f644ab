"""Scores predictions of a growing answer's length, on answers that no probe has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor_store.probe.recording import Recording
from sage_sched.distribution import LengthDistribution
from sage_sched.probe import Edges

AGES = (0, 1, 4, 16, 64, 256)

# The age, the tokens that were left, and their prediction: lengths and weights.
Prediction = tuple[int, int, NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Score:
    """The score over answers at one age.

    mae: the mean absolute error of the predicted mean, in tokens. crps: in tokens.
    covered: the share of central 80 % intervals that held the truth.
    number: of answers.
    """

    mae: float
    crps: float
    covered: float
    number: int


Quality = dict[int, Score]


def quality_by_age(predictions: Iterable[Prediction]) -> Quality:
    """Return a score for each of AGES that has predictions."""
    found: dict[int, list[tuple[float, float, bool]]] = {age: [] for age in AGES}
    for age, left, lengths, weights in predictions:
        if age in found:
            said = LengthDistribution.from_samples(np.rint(lengths), "prior", weights)
            error = abs(float(lengths @ weights) - left)
            found[age].append((error, said.crps(left), said.has_within(left, 0.8)))
    quality = {}
    for age, scores in found.items():
        if scores:
            mae, error, covered = np.mean(scores, axis=0).tolist()
            quality[age] = Score(mae, error, covered, len(scores))
    return quality


def by_prompt(recording: Recording, rows: NDArray[np.bool_]) -> Iterator[Prediction]:
    """Yield predictions for each of the rows, from the prompt and the age."""
    for row in np.flatnonzero(rows).tolist():
        answer, age = int(recording.answer[row]), int(recording.ages[row])
        of_prompt = recording.forecasts[answer]
        known = of_prompt and of_prompt.with_tail(int(recording.caps[answer])).surviving(age)
        if known is not None:
            left = int(recording.lengths[answer]) - age
            yield age, left, (known.lengths - age).astype(np.float64), known.weights


def by_probe(
    recording: Recording, log_p: NDArray[np.float64], edges: Edges, rows: NDArray[np.bool_]
) -> Iterator[Prediction]:
    """Yield predictions for each of the rows, from the probe's scores only. A bin counts as its
    middle. The last bin has no end, and counts as being as wide as the one before."""
    ends = np.append(edges[:-1], 2 * edges[-2] - edges[-3])
    middles: NDArray[np.float64] = (ends[:-1] + 1 + ends[1:]) / 2
    for row in np.flatnonzero(rows).tolist():
        age = int(recording.ages[row])
        left = int(recording.lengths[recording.answer[row]]) - age
        yield age, left, middles, np.exp(log_p[row])
