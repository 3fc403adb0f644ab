"""How much the scores of a probe count, fitted on answers that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from predictor_store.probe.probe_score import Forecast
from predictor_store.probe.recording import Recording
from sage_sched.job import Job
from sage_sched.probe.posterior import Posterior, Reading

_ALPHAS = (0.4, 0.6, 0.8, 1.0)
_BETAS = (0.0, 0.15, 0.3, 0.5, 0.7, 1.0)
_GAMMAS = (0.5, 0.7, 0.85, 0.95, 1.0)
# A band of ages that fewer answers have come to has the beta of all.
_LEAST_ANSWERS = 20
_MAX_ROUNDS = 5


def without_scores(reading: Reading) -> Reading:
    """By the prompt alone."""
    return replace(reading, alpha=1.0, beta=np.zeros(1), gamma=1.0)


def weighed(
    recording: Recording, log_p: NDArray[np.float64], reading: Reading, rows: NDArray[np.bool_]
) -> Reading:
    """With the alpha, beta and gamma under which the lengths of these rows' answers are likeliest.

    First with one beta for all ages; then in turn each band's own, and alpha and gamma again, until
    nothing is better.
    """
    best, chosen = 0.0, without_scores(reading)

    def better(tried: Iterable[Reading]) -> bool:
        nonlocal best, chosen
        before = best
        for one in tried:
            if (gain := _gain(recording, log_p, one, rows)) > best:
                best, chosen = gain, one
        return best > before

    if not better(
        replace(reading, alpha=alpha, beta=np.array([beta]), gamma=gamma)
        for alpha, beta, gamma in product(_ALPHAS, _BETAS[1:], _GAMMAS)
    ):
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
        common = [
            replace(chosen, alpha=alpha, gamma=gamma) for alpha, gamma in product(_ALPHAS, _GAMMAS)
        ]
        if not any([*found, better(common)]):
            break
    return chosen


def _with_beta(reading: Reading, band: int, beta: float) -> Reading:
    betas = reading.beta.copy()
    betas[band] = beta
    return replace(reading, beta=betas)


def _gain(
    recording: Recording, log_p: NDArray[np.float64], reading: Reading, rows: NDArray[np.bool_]
) -> float:
    """By how many nats lengths are likelier than by their prompts, all bands of ages counting
    alike: most scores are of the few answers that are long, late in them."""
    rule = Posterior(reading)
    gains: dict[int, list[float]] = {}
    for job, age, _ in _replayed(recording, log_p, rule, rows):
        if (gain := rule.gain(job)) is not None:
            band = int(np.searchsorted(reading.band_ages, age, side="right"))
            gains.setdefault(band, []).append(gain)
    return float(np.mean([np.mean(of_band) for of_band in gains.values()]))


def _replayed(
    recording: Recording, log_p: NDArray[np.float64], rule: Posterior, rows: NDArray[np.bool_]
) -> Iterator[tuple[Job, int, int]]:
    """Each chosen row's answer as a job, after its scores: the job, the age, and the answer. All
    answers at once, age by age. The job's age is the answer's length, as if it had ended."""
    jobs: dict[int, Job] = {}
    for age in np.unique(recording.ages[rows]).tolist():
        if not rule.wants(age):
            continue
        here = np.flatnonzero(rows & (recording.ages == age))
        answers = recording.answer[here].tolist()
        for answer in answers:
            if answer not in jobs:
                cap = int(recording.caps[answer])
                jobs[answer] = Job(0, 1, cap, recording.forecasts[answer], 0)
                jobs[answer].generated_tokens = int(recording.lengths[answer])
        rule.refine([jobs[answer] for answer in answers], [age] * len(answers), log_p[here])
        yield from ((jobs[answer], age, answer) for answer in answers)


def forecasts(
    recording: Recording, log_p: NDArray[np.float64], rule: Posterior, rows: NDArray[np.bool_]
) -> Iterator[Forecast]:
    """Of each row: the age, what was left, and what it was foretold to be, with weights."""
    for job, _, answer in _replayed(recording, log_p, rule, rows):
        refined = job.refined
        if refined is not None:
            left = int(recording.lengths[answer]) - refined.age_tokens
            yield refined.age_tokens, left, refined.lengths - refined.age_tokens, refined.weights


def alone(
    recording: Recording,
    log_p: NDArray[np.float64],
    edges: NDArray[np.int64],
    rows: NDArray[np.bool_],
) -> Iterator[Forecast]:
    """The same of the probe alone, its bins at their middles."""
    middles = middles_of(edges)
    for row in np.flatnonzero(rows).tolist():
        age = int(recording.ages[row])
        left = int(recording.lengths[recording.answer[row]]) - age
        yield age, left, middles, np.exp(log_p[row])


def middles_of(edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of bins; the last, which has no end, is taken to be as wide as the one before."""
    ends = np.append(edges[:-1], 2 * edges[-2] - edges[-3])
    middles: NDArray[np.float64] = (ends[:-1] + 1 + ends[1:]) / 2
    return middles
