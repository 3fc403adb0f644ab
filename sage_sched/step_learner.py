"""Learns a server's step times while it runs, from the work of its steps and how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sage_sched.steps import ServerFacts, StepTime, seconds_on

Array = NDArray[np.float64]

# The work of a step. A coefficient of StepTime, in the same order, is the time of one of each.
COLUMNS = (
    "prefill_steps", "prefill_requests", "prefill_tokens", "prefill_pairs",
    "decode_steps", "decode_requests", "decode_kv_tokens",
)  # fmt: skip
# A typical prefill and decode step, which are not small. They make coefficients of different units
# comparable, and keep what only small steps have shown from being foretold of larger ones.
_TYPICAL = np.array(
    [[1, 4, 2048, 4 * 512 * 512 / 2, 0, 0, 0], [0, 0, 0, 0, 1, 32, 32_768]], dtype=np.float64
)
# The assumed error of the prior, as a share of a typical step: the noisier the steps, the more of
# them it takes to outweigh it.
_PRIOR_ERROR = 0.5
# Relative errors above so many standard deviations are outliers; the least standard deviation.
_OUTLIER, _LEAST_SPREAD = 1.5, 0.01
_MAX_ROUNDS, _TOLERANCE = 30, 1e-4
# The least share of a typical step that its tokens take, as noise hides a slope by which others
# divide; and, by kind of step, which coefficient is that of tokens.
_LEAST_SHARE = 1e-3
_OF_TOKENS = (2, 6)
# Step times are learned from so many steps, the latest, and anew after so many more.
MEMORY_STEPS, INTERVAL_STEPS = 2048, 256
# Lengths of typical prompts and answers.
_TYPICAL_TOKENS = (32, 512, 8192)
# Smaller relative changes of costs count as none.
_WORTH_TELLING = 0.1


class StepLearner:
    """Step times from the latest steps. Coefficients on which these are silent stay as they were,
    times one factor; see fit.

    step_time: as known now. num_steps: seen in all. error: the median relative error on the latest
    steps before they were learned from; None until anything was learned.
    """

    def __init__(self, start: StepTime) -> None:
        self.step_time = start
        self.num_steps = 0
        self.error: float | None = None
        self._steps = np.zeros((MEMORY_STEPS, len(COLUMNS) + 1))
        self._num_learned = 0

    def add(self, work: Sequence[float], seconds: float) -> None:
        """A step: its work, see COLUMNS, and its seconds. Ignored if these are not above 0."""
        if seconds > 0:
            self._steps[self.num_steps % MEMORY_STEPS] = (*work, seconds)
            self.num_steps += 1

    @property
    def is_due(self) -> bool:
        """Whether enough has been seen since learn() to learn anew."""
        return self.num_steps - self._num_learned >= INTERVAL_STEPS

    def learn(self) -> None:
        """Learn from the latest steps; there must be one."""
        steps = self._steps[: self.num_steps]
        if self._num_learned:
            self.error = self._error()
        self.step_time = fit(steps[:, :-1], steps[:, -1], self.step_time)
        self._num_learned = self.num_steps

    def factor(self, step_time: StepTime) -> float:
        """How many times as long as step_time says the latest steps mostly took; 1 without any."""
        steps = self._steps[: self.num_steps]
        return factor(steps[:, :-1], steps[:, -1], step_time)

    def errors(self, step_time: StepTime) -> dict[str, float]:
        """By how much it is wrong on the latest steps, as a mean share of what they took, by kind
        (MAPE)."""
        steps = self._steps[: self.num_steps]
        shares = np.abs(steps[:, :-1] @ np.array(astuple(step_time)) / steps[:, -1] - 1)
        prefills, decodes = steps[:, 0] > 0, steps[:, 5] > 0
        kinds = {"prefill": prefills & ~decodes, "decode": ~prefills, "mixed": prefills & decodes}
        return {name: float(shares[of].mean()) for name, of in kinds.items() if of.any()}

    def _error(self) -> float:
        unlearned = np.arange(self._num_learned, self.num_steps)[-MEMORY_STEPS:] % MEMORY_STEPS
        steps = self._steps[unlearned]
        expected_s = steps[:, :-1] @ np.array(astuple(self.step_time))
        return float(np.median(np.abs(steps[:, -1] / np.maximum(expected_s, 1e-12) - 1)))


def is_worth_telling(new: StepTime, old: StepTime, server: ServerFacts) -> bool:
    """Whether costs have changed by more than a tenth: in general, or those of one typical request
    relative to the others."""
    most_tokens = server.kv_pool_tokens // 4
    lengths = [min(tokens, most_tokens) for tokens in _TYPICAL_TOKENS]
    before, after = (seconds_on(replace(server, step_time=step_time)) for step_time in (old, new))
    changes = np.log([after(i, o) / before(i, o) for i in lengths for o in lengths])
    common = np.median(changes)
    limit = np.log1p(_WORTH_TELLING)
    return bool(abs(common) > limit or np.abs(changes - common).max() > limit)


def fit(work: Array, seconds: Array, prior: StepTime) -> StepTime:
    """The coefficients that explain the steps, each at least 0.

    Where the steps are silent, it is the prior times one factor, by which most steps differ from
    it. A token is never free: the tokens of a typical step take at least a thousandth of it. Errors
    are relative to a step's own length, so that a short step counts as much as a long one, and
    outliers count little (Huber's loss, by reweighting).

    work: shape (n, 7), n at least 1, see COLUMNS. seconds: shape (n,), above 0.
    """
    known = factor(work, seconds, prior) * np.array(astuple(prior))
    typical = _typical(work)
    # The shortest step: otherwise a few that were measured as next to nothing, behind others that
    # were measured as too long, would outweigh all.
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
    """How many times as long as step_time says most steps take; 1 if it says nothing of them."""
    expected = work @ np.array(astuple(step_time))
    told = expected > 0
    return float(np.median(seconds[told] / expected[told])) if told.any() else 1.0


def _typical(work: Array) -> Array:
    """The work of a typical prefill and decode step, at least that of those seen; shape (2, 7)."""
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
    solution: Array = _nonnegative_minimum(gram, target) / shares
    return solution


def _nonnegative_minimum(gram: Array, target: Array) -> Array:
    """The x of no negative part that minimizes x'Gx / 2 - t'x; G is positive definite. With G = LL'
    that is half the square of L'x less the solution of Ly = t, and a constant."""
    factor = np.linalg.cholesky(gram)
    return np.asarray(nnls(factor.T, np.linalg.solve(factor, target))[0], dtype=np.float64)
