"""How much a probe's scores should count, and how good the resulting forecasts are.

Both are measured on answers that the probe was not trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from predictor_store.probe.recording import Recording
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.probe import Posterior, Reading

AGES = (0, 1, 4, 16, 64, 256)
_ALPHAS = (0.4, 0.6, 0.8, 1.0)
_BETAS = (0.0, 0.15, 0.3, 0.5, 0.7, 1.0)
_GAMMAS = (0.5, 0.7, 0.85, 0.95, 1.0)
# A band of ages that fewer answers have reached has the beta of all.
_LEAST_ANSWERS = 20
_MAX_ROUNDS = 5

# The age, what was left, and its forecast: lengths and weights.
Forecast = tuple[int, int, NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Score:
    """Over answers at one age. mae: of the mean, tokens. crps: tokens. covered: the share of
    central 80 % intervals that held the truth. number: of answers."""

    mae: float
    crps: float
    covered: float
    number: int


Quality = dict[int, Score]


def quality_by_age(forecasts: Iterable[Forecast]) -> Quality:
    """At those of AGES for which there are forecasts."""
    found: dict[int, list[tuple[float, float, bool]]] = {age: [] for age in AGES}
    for age, left, lengths, weights in forecasts:
        if age in found:
            said = _distribution(lengths, weights)
            error = abs(float(lengths @ weights) - left)
            found[age].append((error, said.crps(left), said.has_within(left, 0.8)))
    quality = {}
    for age, scores in found.items():
        if scores:
            mae, error, covered = np.mean(scores, axis=0).tolist()
            quality[age] = Score(mae, error, covered, len(scores))
    return quality


def without_scores(reading: Reading) -> Reading:
    return replace(reading, alpha=1.0, beta=np.zeros(1), gamma=1.0)


def weighed(
    recording: Recording, log_p: NDArray[np.float64], reading: Reading, rows: NDArray[np.bool_]
) -> Reading:
    """The reading whose alpha, beta and gamma save most of the prompts' error (CRPS) on the answers
    of these rows. All bands of ages count the same: most scores are of the few long answers, late
    in them.

    First with one beta for all ages. Then each band's beta in turn, and alpha and gamma again,
    until nothing improves. Chosen by likelihood, forecasts would be flattened until their means
    were far too long.
    """
    best, chosen = 0.0, without_scores(reading)
    by_prompt = _errors(recording, log_p, chosen, rows)

    def better(tried: Iterable[Reading]) -> bool:
        nonlocal best, chosen
        before = best
        for one in tried:
            errors = _errors(recording, log_p, one, rows)
            if (gain := float(np.mean([1 - errors[b] / by_prompt[b] for b in errors]))) > best:
                best, chosen = gain, one
        return best > before

    every = product(_ALPHAS, _BETAS[1:], _GAMMAS)
    if not better(replace(reading, alpha=a, beta=np.array([b]), gamma=c) for a, b, c in every):
        return chosen
    band_of = np.searchsorted(reading.band_ages, recording.ages, side="right") - 1
    bands = [
        band
        for band in range(reading.band_ages.size)
        if np.unique(recording.answer[rows & (band_of == band)]).size >= _LEAST_ANSWERS
    ]
    chosen = replace(chosen, beta=np.broadcast_to(chosen.beta, reading.band_ages.shape))
    for _ in range(_MAX_ROUNDS):
        found = [better([_with_beta(chosen, band, beta) for beta in _BETAS]) for band in bands]
        common = [replace(chosen, alpha=a, gamma=c) for a, c in product(_ALPHAS, _GAMMAS)]
        if not any([*found, better(common)]):
            break
    return chosen


def _with_beta(reading: Reading, band: int, beta: float) -> Reading:
    here = np.arange(reading.beta.size) == band
    return replace(reading, beta=np.where(here, beta, reading.beta))


def _errors(
    recording: Recording, log_p: NDArray[np.float64], reading: Reading, rows: NDArray[np.bool_]
) -> dict[int, float]:
    """The mean CRPS in tokens, above 0, by band of ages."""
    errors: dict[int, list[float]] = {}
    for age, left, lengths, weights in forecasts(recording, log_p, reading, rows):
        band = int(np.searchsorted(reading.band_ages, age, side="right"))
        error = _distribution(lengths, weights).crps(left)
        errors.setdefault(band, []).append(error)
    return {band: max(float(np.mean(of_band)), 1e-9) for band, of_band in errors.items()}


def _distribution(lengths: NDArray[np.float64], weights: NDArray[np.float64]) -> LengthDistribution:
    return LengthDistribution.from_samples(np.rint(lengths), "prior", weights)


def forecasts(
    recording: Recording, log_p: NDArray[np.float64], reading: Reading, rows: NDArray[np.bool_]
) -> Iterator[Forecast]:
    """For each of the rows, from the prompt and all scores so far: all answers at once, age by age,
    each a job whose age is the answer's length, as if it had ended."""
    jobs: dict[int, Job] = {}
    rule = Posterior(reading)
    for age in filter(rule.wants, np.unique(recording.ages[rows]).tolist()):
        here = np.flatnonzero(rows & (recording.ages == age))
        answers = recording.answer[here].tolist()
        for answer in answers:
            if answer not in jobs:
                cap = int(recording.caps[answer])
                jobs[answer] = Job(0, 1, cap, recording.forecasts[answer], 0)
                jobs[answer].generated_tokens = int(recording.lengths[answer])
        rule.refine([jobs[answer] for answer in answers], [age] * len(answers), log_p[here])
        for answer in answers:
            if (refined := jobs[answer].refined) is not None:
                at = refined.age_tokens
                left = int(recording.lengths[answer]) - at
                yield at, left, refined.lengths - at, refined.weights


def alone(
    recording: Recording,
    log_p: NDArray[np.float64],
    edges: NDArray[np.int64],
    rows: NDArray[np.bool_],
) -> Iterator[Forecast]:
    """For each of the rows, from its scores only, with each bin at its middle. The last bin has no
    end; it is taken to be as wide as the one before."""
    ends = np.append(edges[:-1], 2 * edges[-2] - edges[-3])
    middles: NDArray[np.float64] = (ends[:-1] + 1 + ends[1:]) / 2
    for row in np.flatnonzero(rows).tolist():
        age = int(recording.ages[row])
        left = int(recording.lengths[recording.answer[row]]) - age
        yield age, left, middles, np.exp(log_p[row])
