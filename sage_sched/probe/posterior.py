"""Bayes' rule over the length of an answer, from the prompt's forecast and a probe's scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats, LengthDistribution, Refined
from sage_sched.job import Job

# Cells are a token wide up to some twenty tokens, and this share of their length beyond.
_CELL_SHARE = 0.05
# Scores are used at the ages 0, 1, 2, 4, 8, 16, 32, and then every so many tokens.
DUE_INTERVAL_TOKENS = 32
_LEAST_LOG = -60.0
# Spreads each length that was seen over the cells around it: a forecast consists of a few dozen
# lengths, and those between them are not impossible.
_KERNEL = np.array([1.0, 2.0, 3.0, 4.0, 3.0, 2.0, 1.0]) / 16


def is_due(age_tokens: int) -> bool:
    """Whether the posterior asks for scores at this age."""
    if age_tokens >= DUE_INTERVAL_TOKENS:
        return age_tokens % DUE_INTERVAL_TOKENS == 0
    return age_tokens & (age_tokens - 1) == 0


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """How to read a probe's scores.

    edges: int64, shape (bins + 1,): in bin b more than edges[b] tokens are left, and at most
        edges[b + 1]; the last bin has no end. The first edge is 0.
    band_ages: int64, shape (bands,): the age at which each band begins; the first is 0.
    log_base: ln of the probe's mean P(bin | band) on its training data, shape (bands, bins).
    alpha, beta, gamma: see Posterior. beta: by band, shape (bands,), or one for all, shape (1,).
    """

    edges: NDArray[np.int64]
    band_ages: NDArray[np.int64]
    log_base: Floats
    alpha: float = 1.0
    beta: Floats = field(default_factory=lambda: np.ones(1))
    gamma: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError unless the fields are as the class documents them."""
        bins, bands = self.edges.size - 1, self.band_ages.size
        if bins < 2 or self.edges[0] != 0 or np.any(np.diff(self.edges) <= 0):
            raise ValueError(f"edges are {self.edges.tolist()!r:.80}, allowed: 0, then rising")
        if bands < 1 or self.band_ages[0] != 0 or np.any(np.diff(self.band_ages) <= 0):
            raise ValueError(f"band_ages are {self.band_ages.tolist()}, allowed: 0, then rising")
        if self.log_base.shape != (bands, bins) or not np.all(np.isfinite(self.log_base)):
            raise ValueError(f"log_base is of shape {self.log_base.shape}, not {(bands, bins)}")
        if self.beta.shape not in ((1,), (bands,)):
            raise ValueError(f"beta is of shape {self.beta.shape}, not {(bands,)}")
        for name in ("alpha", "beta", "gamma"):
            if not all(0 <= number <= 2 for number in np.ravel(getattr(self, name)).tolist()):
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: 0 to 2")


@dataclass(slots=True, eq=False)
class _Evidence:
    """What is known of a job: by cells of length, ln of its forecast and of its scores."""

    age_tokens: int
    log_prior: Floats
    log_seen: Floats


class Posterior:
    """Refines forecasts by Bayes' rule over the whole length x of an answer.

    The whole length does not change while an answer grows, so evidence from one age holds at all
    later ones, and no transition between bins is needed. With p_a the probe's distribution of the
    rest at age a, and pi_a its mean on the training data,

        A(x) <- gamma A(x) + beta_a (ln p_a(x - a) - ln pi_a(x - a))
        w'(x) ~ w(x)^alpha e^A(x)    for x > age

    where w is the prompt's forecast. alpha = beta = gamma = 1 is Bayes' rule if scores at different
    ages are independent given x. They are not, and each has seen the prompt too, so the three are
    fitted (predictor_store.probe.weights), beta by bands of ages: the first scores are news, and
    most later ones repeat them.

    Lengths are grouped into cells. A forecast of n samples gives 1 / (n + 1) to lengths that it has
    not seen, the same to each cell, as no score can raise a weight of 0.
    """

    wants = staticmethod(is_due)

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._beta = np.broadcast_to(reading.beta, reading.band_ages.shape)
        self._widths = np.diff(reading.edges)

    def refine(self, jobs: Sequence[Job], ages: Sequence[int], log_p: Floats) -> list[Job]:
        """See sage_sched.probe.refining.Refiner. Jobs without a forecast are left as they are."""
        # Jobs of one cap go together; two ages of one job go one after the other.
        alike: dict[tuple[int, int], list[int]] = {}
        turns = Counter[Job]()
        for row, (job, age_tokens) in enumerate(zip(jobs, ages, strict=True)):
            evidence = job.evidence
            if evidence is None and job.distribution is not None:
                job.evidence = evidence = self._start(job.distribution, job.max_new_tokens)
            if isinstance(evidence, _Evidence) and evidence.age_tokens < age_tokens:
                evidence.age_tokens = age_tokens
                # From its cap on nothing is left.
                if age_tokens < job.max_new_tokens:
                    alike.setdefault((turns[job], job.max_new_tokens), []).append(row)
                    turns[job] += 1
        for (_, cap_tokens), rows in sorted(alike.items()):
            age = np.array([ages[row] for row in rows], np.int64)[:, None]
            self._refine([jobs[row] for row in rows], age, _ends(cap_tokens), log_p[rows])
        return [*turns]

    def gain(self, job: Job) -> float | None:
        evidence = job.evidence
        if not isinstance(evidence, _Evidence) or job.distribution is None:
            return None
        ends = _ends(job.max_new_tokens)
        held = np.maximum(ends[1:] - np.maximum(ends[:-1], evidence.age_tokens), 0)
        cell = int(np.searchsorted(ends, job.generated_tokens)) - 1
        if not 0 <= cell < held.size or not held[cell]:
            return None
        prompt = np.log(_density(job.distribution, job.max_new_tokens))
        both = evidence.log_prior + evidence.log_seen
        return _log_share(both, held, cell) - _log_share(prompt, held, cell)

    def _start(self, distribution: LengthDistribution, cap_tokens: int) -> _Evidence:
        log_prior = np.log(_density(distribution, cap_tokens))
        return _Evidence(-1, self.reading.alpha * log_prior, np.zeros(log_prior.size))

    def _refine(
        self, jobs: Sequence[Job], age: NDArray[np.int64], ends: NDArray[np.int64], log_p: Floats
    ) -> None:
        """Jobs of one cap. age: shape (jobs, 1). ends: of the cells."""
        reading = self.reading
        band = np.searchsorted(reading.band_ages, age[:, 0], side="right") - 1
        left = np.maximum(ends - age, 0)
        held = left[:, 1:] - left[:, :-1]
        seen = self._by_cell(left, held, log_p - reading.log_base[band])
        told = [evidence for job in jobs if isinstance(evidence := job.evidence, _Evidence)]
        log_seen = np.array([evidence.log_seen for evidence in told])
        log_seen = reading.gamma * log_seen + self._beta[band, None] * seen
        log_seen -= log_seen.max(axis=1, keepdims=True)
        logs = log_seen + np.array([evidence.log_prior for evidence in told])
        logs[held == 0] = -np.inf
        logs -= logs.max(axis=1, keepdims=True)
        weights = held * np.exp(np.maximum(logs, _LEAST_LOG))
        weights /= weights.sum(axis=1, keepdims=True)
        lengths = age + (left[:, :-1] + left[:, 1:] + 1) / 2
        for row, job in enumerate(jobs):
            told[row].log_seen = log_seen[row]
            job.revise(Refined(int(age[row, 0]), lengths[row], weights[row]))

    def _by_cell(self, left: NDArray[np.int64], held: NDArray[np.int64], scores: Floats) -> Floats:
        """ln of the mean of e^score over the rest of each cell, shape (jobs, cells). left: tokens
        to the end of each cell, shape (jobs, cells + 1)."""
        edges = self.reading.edges
        level = np.exp(scores - scores.max(axis=1, keepdims=True))
        area = np.zeros((len(left), edges.size))
        np.cumsum(level * self._widths, axis=1, out=area[:, 1:])
        bin_of = np.searchsorted(edges, left, side="left") - 1
        np.clip(bin_of, 0, level.shape[1] - 1, out=bin_of)
        rows = np.arange(len(left))[:, None]
        under = area[rows, bin_of] + level[rows, bin_of] * (left - edges[bin_of])
        mean = (under[:, 1:] - under[:, :-1]) / np.maximum(held, 1)
        seen: Floats = np.log(np.maximum(mean, 1e-26))
        return seen


def _density(distribution: LengthDistribution, cap_tokens: int) -> Floats:
    """The weight of a token's length in each cell up to the cap, above 0."""
    ends = _ends(cap_tokens)
    num_cells = ends.size - 1
    capped = np.minimum(distribution.lengths, cap_tokens)
    seen = np.bincount(
        np.searchsorted(ends, capped) - 1, weights=distribution.weights, minlength=num_cells
    )
    mass: Floats = np.convolve(seen, _KERNEL)[_KERNEL.size // 2 :][:num_cells]
    mass = mass / mass.sum()
    unseen = 1.0 / (distribution.effective_samples + 1.0)
    density: Floats = (mass * (1 - unseen) + unseen / num_cells) / np.diff(ends)
    return density


def _log_share(log_density: Floats, held: NDArray[np.int64], cell: int) -> float:
    top = log_density[held > 0].max()
    total = held @ np.exp(np.minimum(log_density - top, 0.0))
    return float(log_density[cell] - top - np.log(total))


@lru_cache(maxsize=1)
def _grid() -> NDArray[np.int64]:
    ends = [0]
    while ends[-1] < 1 << 24:
        ends.append(ends[-1] + max(1, int(ends[-1] * _CELL_SHARE)))
    return np.array(ends)


@lru_cache(maxsize=256)
def _ends(cap_tokens: int) -> NDArray[np.int64]:
    """Where each cell of lengths ends, from 0; the last at the cap."""
    num_cells = int(np.searchsorted(_grid(), cap_tokens))
    return np.minimum(_grid()[: num_cells + 1], cap_tokens)
