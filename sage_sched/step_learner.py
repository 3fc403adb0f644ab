"""Step times that follow a server while it runs: fitted to what steps had to do and how long they
took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from sage_sched.cost import seconds_on
from sage_sched.steps import ServerFacts, StepTime

Array = NDArray[np.float64]

# What a step may have to do. The coefficients of StepTime, in their order, are what one of each
# takes.
COLUMNS = (
    "prefill_steps", "prefill_requests", "prefill_tokens", "prefill_pairs",
    "decode_steps", "decode_requests", "decode_kv_tokens",
)  # fmt: skip
# A prefill and a decode step that are not small. They make coefficients of different units
# comparable: what only small steps were seen to take must not be foretold of larger ones.
_TYPICAL = np.array(
    [[1, 4, 2048, 4 * 512 * 512 / 2, 0, 0, 0], [0, 0, 0, 0, 1, 32, 32_768]], dtype=np.float64
)
# The prior is taken to be off by this share of a typical step: the noisier the steps, the more of
# them it takes to outweigh it.
_PRIOR_ERROR = 0.5
# Relative errors above so many standard deviations count as outliers; the least that a standard
# deviation is taken for.
_OUTLIER, _LEAST_SPREAD = 1.5, 0.01
_MAX_ROUNDS, _TOLERANCE = 30, 1e-4
# Of a typical step at least so much is for its tokens: noise hides a slope, and what a token takes
# is divided by. Of StepTime, by kind of step: which coefficient is theirs.
_LEAST_SHARE = 1e-3
_OF_TOKENS = (2, 6)
_SUPPORTS = np.array(list(product((False, True), repeat=len(COLUMNS))))
# Of so many steps, the latest, step times are learned, anew after so many more.
MEMORY_STEPS, INTERVAL_STEPS = 2048, 256
# Prompts and answers of such lengths stand for all.
_TYPICAL_TOKENS = (32, 512, 8192)
# Costs that change by a smaller share have not changed.
_WORTH_TELLING = 0.1


class StepLearner:
    """Step times from the latest steps. What these do not tell stays as it was learned or given,
    times one factor; see fit.

    step_time: as known now. num_steps: seen in all. error: the median relative error of the latest
    steps before they were learned from; None before anything was learned.
    """

    def __init__(self, start: StepTime) -> None:
        self.step_time = start
        self.num_steps = 0
        self.error: float | None = None
        self._steps = np.zeros((MEMORY_STEPS, len(COLUMNS) + 1))
        self._num_learned = 0

    def add(self, work: Sequence[float], seconds: float) -> None:
        """A step: what it had to do, see COLUMNS, and how long it took, if above 0."""
        if seconds > 0:
            self._steps[self.num_steps % MEMORY_STEPS] = (*work, seconds)
            self.num_steps += 1

    @property
    def is_due(self) -> bool:
        """Whether enough has been seen since learn() to learn anew."""
        return self.num_steps - self._num_learned >= INTERVAL_STEPS

    def learn(self) -> None:
        """Learn from the latest steps, of which there is one."""
        steps = self._steps[: self.num_steps]
        if self._num_learned:
            self.error = self._error()
        self.step_time = fit(steps[:, :-1], steps[:, -1], self.step_time)
        self._num_learned = self.num_steps

    def factor(self, step_time: StepTime) -> float:
        """By how much most of the latest steps took longer than step_time says; 1 before there are
        any."""
        steps = self._steps[: self.num_steps]
        return factor(steps[:, :-1], steps[:, -1], step_time)

    def _error(self) -> float:
        unlearned = np.arange(self._num_learned, self.num_steps)[-MEMORY_STEPS:] % MEMORY_STEPS
        steps = self._steps[unlearned]
        expected_s = steps[:, :-1] @ np.array(astuple(self.step_time))
        return float(np.median(np.abs(steps[:, -1] / np.maximum(expected_s, 1e-12) - 1)))


def is_worth_telling(new: StepTime, old: StepTime, server: ServerFacts) -> bool:
    """Whether costs have changed by more than a tenth: most of them in seconds, or those of a
    typical request relative to the others."""
    most_tokens = server.kv_pool_tokens // 4
    lengths = [min(tokens, most_tokens) for tokens in _TYPICAL_TOKENS]
    before, after = (seconds_on(replace(server, step_time=step_time)) for step_time in (old, new))
    changes = np.log([after(i, o) / before(i, o) for i in lengths for o in lengths])
    common = np.median(changes)
    limit = np.log1p(_WORTH_TELLING)
    return bool(abs(common) > limit or np.abs(changes - common).max() > limit)


def fit(work: Array, seconds: Array, prior: StepTime) -> StepTime:
    """The coefficients that explain the steps, each at least 0.

    work: shape (n, 7), n at least 1, see COLUMNS. seconds: shape (n,), above 0.
    A token is never free: those of a typical step take a thousandth of it at least.
    What the steps do not tell is as in the prior, all of it times one factor: the one by which
    most steps differ from it. Errors count relative to a step's own length, so that a short step
    counts as much as a long one, and outliers count little (Huber's loss, by reweighting).
    """
    known = factor(work, seconds, prior) * np.array(astuple(prior))
    typical = _typical(work)
    # The least that a step is taken to last, so that a few that were measured as nothing, behind
    # others that were measured as too long, do not outweigh all.
    shortest = 0.1 * float(np.median(seconds))
    expected = np.maximum(seconds, shortest)
    counts, spread = np.ones_like(seconds), _PRIOR_ERROR
    found = known
    for _ in range(_MAX_ROUNDS):
        rows = (work / expected[:, None], seconds / expected, counts)
        last, found = found, _solved(*rows, known, typical, (spread / _PRIOR_ERROR) ** 2)
        expected = np.maximum(work @ found, shortest)
        errors = np.abs(seconds / expected - 1)
        spread = max(1.4826 * float(np.median(errors)), _LEAST_SPREAD)
        counts = np.minimum(1.0, _OUTLIER * spread / np.maximum(errors, 1e-12))
        if np.allclose(found, last, rtol=_TOLERANCE, atol=0):
            break
    found = found.copy()
    for typical_step, of_tokens in zip(typical, _OF_TOKENS, strict=True):
        least_s = _LEAST_SHARE * float(typical_step @ found) / typical_step[of_tokens]
        found[of_tokens] = max(found[of_tokens], least_s)
    return StepTime(*found.tolist())


def factor(work: Array, seconds: Array, step_time: StepTime) -> float:
    """How much longer most steps take than step_time says; 1 if it says nothing of them."""
    expected = work @ np.array(astuple(step_time))
    told = expected > 0
    return float(np.median(seconds[told] / expected[told])) if told.any() else 1.0


def _typical(work: Array) -> Array:
    """What a prefill and a decode step may have to do, shape (2, 7)."""
    typical = _TYPICAL.copy()
    for kind, columns in enumerate((slice(0, 4), slice(4, 7))):
        seen = work[work[:, columns.start] > 0, columns]
        if len(seen):
            typical[kind, columns] = np.maximum(typical[kind, columns], seen.mean(axis=0))
    return typical


def _solved(
    work: Array, seconds: Array, counts: Array, known: Array, typical: Array, pull: float
) -> Array:
    """Least squares of weighted rows, none of the solution negative, drawn to what is known as by
    `pull` typical steps that only one column each makes long."""
    # In shares of a typical step.
    typical_s = np.maximum(typical @ known, 1e-12)
    shares = (typical / typical_s[:, None]).sum(axis=0)
    columns = work / shares
    gram = columns.T @ (columns * counts[:, None]) + pull * np.eye(len(COLUMNS))
    target = columns.T @ (counts * seconds) + pull * known * shares
    solution = _nonnegative_minimum(gram, target) / shares
    return np.asarray(solution, dtype=np.float64)


def _nonnegative_minimum(gram: Array, target: Array) -> Array:
    """The x of no negative part that minimizes x'Gx / 2 - t'x; G is positive definite.

    It is the free minimum on its own support, so the best of those that are nowhere negative. Of
    seven numbers there are 128 supports, which are solved at once.
    """
    free = np.linalg.solve(gram, target)
    if (free >= 0).all():
        return np.asarray(free, dtype=np.float64)
    both = _SUPPORTS[:, :, None] & _SUPPORTS[:, None, :]
    grams = np.where(both, gram, np.eye(len(target)))
    minima = np.linalg.solve(grams, (_SUPPORTS * target)[:, :, None])[:, :, 0]
    values = -(minima @ target) / 2
    values[(minima < 0).any(axis=1)] = np.inf
    best: Array = minima[int(values.argmin())]
    return best
