"""Learns a server's step times while it runs, from the work of its steps and how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sage_sched.steps import ServerFacts, StepTime, seconds_on

Array = NDArray[np.float64]

# The columns of a step's work. The coefficients of StepTime, in the same order, are seconds per
# unit of each.
COLUMNS = (
    "prefill_steps", "prefill_requests", "prefill_tokens", "prefill_pairs",
    "decode_steps", "decode_requests", "decode_kv_tokens",
)  # fmt: skip
# A typical prefill step and a typical decode step, neither of them small. They make coefficients of
# different units comparable, and avoid extrapolating from small steps to large ones.
_TYPICAL = np.array(
    [[1, 4, 2048, 4 * 512 * 512 / 2, 0, 0, 0], [0, 0, 0, 0, 1, 32, 32_768]], dtype=np.float64
)
# The assumed error of the prior, as a share of a typical step. The noisier the steps, the more of
# them it takes to outweigh the prior.
_PRIOR_ERROR = 0.5
# Relative errors above _OUTLIER standard deviations are outliers. The standard deviation counts as
# _LEAST_SPREAD if it is smaller.
_OUTLIER, _LEAST_SPREAD = 1.5, 0.01
_MAX_ROUNDS, _TOLERANCE = 30, 1e-4
# Steps that are longer than expected by more than this many standard deviations of their kind do
# not count at all, because a kernel was compiled or the host was away.
_REJECTED, _REJECTING_ROUNDS = 6.0, 3
# The first prefills of a server compile kernels. They are not learned from.
NUM_COMPILING = 12
# The tokens of a typical step take at least this share of it, because noise can hide their slope,
# and other code divides by it. _OF_TOKENS: the column of tokens in each kind of step.
_LEAST_SHARE = 1e-3
_OF_TOKENS = (2, 6)
# Step times are learned from the latest MEMORY_STEPS steps: after INTERVAL_STEPS, then after half
# as many more as before, because learning takes milliseconds; at least every MEMORY_STEPS / 2.
MEMORY_STEPS, INTERVAL_STEPS = 2048, 256
# Lengths of typical prompts and answers.
_TYPICAL_TOKENS = (32, 512, 8192)
# Smaller relative changes of costs are not reported.
_WORTH_REPORTING = 0.1


class StepLearner:
    """Learns step times from the latest steps.

    Coefficients that these steps do not determine keep their values, times one factor; see fit.

    step_time: the present estimate.
    num_steps: steps seen so far.
    error: the median relative error on the latest steps before they were learned from; None until
        anything was learned.
    """

    def __init__(self, start: StepTime) -> None:
        self.step_time = start
        self.num_steps = 0
        self.error: float | None = None
        self._steps = np.zeros((MEMORY_STEPS, len(COLUMNS) + 1))
        self._num_learned = 0
        # Prefills seen, and the number at which learning is due.
        self._num_prefills, self._due_prefills = -NUM_COMPILING, 1

    def add(self, work: Sequence[float], seconds: float) -> None:
        """Add a step: its work, see COLUMNS, and its seconds. It is ignored unless seconds is above
        0. The first prefills are ignored, too."""
        if seconds <= 0:
            return
        self._num_prefills += work[0] > 0
        if not work[0] or self._num_prefills > 0:
            self._steps[self.num_steps % MEMORY_STEPS] = (*work, seconds)
            self.num_steps += 1

    @property
    def is_due(self) -> bool:
        """Whether half as many steps again as at learn() were seen, or half as many prefills again.
        Prefills can be rare, and no other step shows their time."""
        if self._num_prefills >= self._due_prefills:
            return True
        interval = min(max(INTERVAL_STEPS, self._num_learned // 2), MEMORY_STEPS // 2)
        return self.num_steps - self._num_learned >= interval

    def learn(self) -> None:
        """Learn from the latest steps. There must be at least one."""
        if self._num_learned:
            self.error = self._error()
        self.step_time = fit(*self._latest(), self.step_time)
        self._num_learned = self.num_steps
        num_prefills = max(0, self._num_prefills)
        self._due_prefills = max(num_prefills + 1, 3 * num_prefills // 2)

    def factor(self, step_time: StepTime) -> float:
        """Return the median ratio of the latest steps' time to the time by step_time; 1 without any
        step."""
        return factor(*self._latest(), step_time)

    def _latest(self) -> tuple[Array, Array]:
        """Return the work and the seconds of the latest steps."""
        steps = self._steps[: self.num_steps]
        return steps[:, :-1], steps[:, -1]

    def errors(self, step_time: StepTime) -> dict[str, float]:
        """Return the mean relative error of step_time on the latest steps, by kind of step
        (MAPE)."""
        work, seconds = self._latest()
        shares = np.abs(work @ np.array(astuple(step_time)) / seconds - 1)
        prefills, decodes = work[:, 0] > 0, work[:, 5] > 0
        kinds = {"prefill": prefills & ~decodes, "decode": ~prefills, "mixed": prefills & decodes}
        return {name: float(shares[of].mean()) for name, of in kinds.items() if of.any()}

    def _error(self) -> float:
        unlearned = np.arange(self._num_learned, self.num_steps)[-MEMORY_STEPS:] % MEMORY_STEPS
        steps = self._steps[unlearned]
        expected_s = steps[:, :-1] @ np.array(astuple(self.step_time))
        return float(np.median(np.abs(steps[:, -1] / np.maximum(expected_s, 1e-12) - 1)))


def is_worth_reporting(new: StepTime, old: StepTime, server: ServerFacts) -> bool:
    """Whether costs have changed by more than a tenth: in general, or for one typical request
    relative to the others."""
    most_tokens = server.kv_pool_tokens // 4
    lengths = [min(tokens, most_tokens) for tokens in _TYPICAL_TOKENS]
    before, after = (seconds_on(replace(server, step_time=step_time)) for step_time in (old, new))
    changes = np.log([after(i, o) / before(i, o) for i in lengths for o in lengths])
    common = np.median(changes)
    limit = np.log1p(_WORTH_REPORTING)
    return bool(abs(common) > limit or np.abs(changes - common).max() > limit)


def fit(work: Array, seconds: Array, prior: StepTime) -> StepTime:
    """Return the coefficients that explain the steps, each at least 0.

    Coefficients that the steps do not determine are those of the prior times one factor, the median
    ratio between the steps and the prior. A token is never free: the tokens of a typical step take
    at least a thousandth of it. Errors are relative to a step's own length, so that a short step
    counts as much as a long one. Outliers count little (Huber's loss, by reweighting). Steps that
    are far too long do not count.

    work: shape (n, 7), n at least 1, see COLUMNS. seconds: shape (n,), above 0.
    """
    known = factor(work, seconds, prior) * np.array(astuple(prior))
    typical = _typical(work)
    prefills = work[:, 0] > 0
    shortest = _shortest(seconds, prefills)
    expected, counting = np.maximum(seconds, shortest), np.ones(len(seconds), dtype=bool)
    for _ in range(_REJECTING_ROUNDS + 1):
        rows = (work[counting], seconds[counting], expected[counting], shortest[counting])
        found = _fitted(*rows, known, typical)
        expected = np.maximum(work @ found, shortest)
        last, counting = counting, ~_far_too_long(seconds / expected - 1, prefills)
        if np.array_equal(counting, last):
            break
    for typical_step, of_tokens in zip(typical, _OF_TOKENS, strict=True):
        least_s = _LEAST_SHARE * float(typical_step @ found) / typical_step[of_tokens]
        found[of_tokens] = max(found[of_tokens], least_s)
    return StepTime(*found.tolist())


def _fitted(
    work: Array, seconds: Array, expected: Array, shortest: Array, known: Array, typical: Array
) -> Array:
    """Return the coefficients for these steps. expected: the seconds to begin with."""
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
    return found.copy()


def _shortest(seconds: Array, prefills: NDArray[np.bool_]) -> Array:
    """Return the shortest time of each step that counts: a tenth of what is usual for its kind.
    Otherwise a few steps measured as next to nothing, after others measured as too long, would
    outweigh all."""
    found = np.empty_like(seconds)
    for kind in (prefills, ~prefills):
        if kind.any():
            found[kind] = 0.1 * np.median(seconds[kind])
    return found


def _far_too_long(excess: Array, prefills: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which steps are far too long for their kind. excess: relative to the expected time."""
    found = np.zeros_like(prefills)
    for kind in (prefills, ~prefills):
        if kind.any():
            spread = max(1.4826 * float(np.median(np.abs(excess[kind]))), _LEAST_SPREAD)
            found |= kind & (excess > _REJECTED * spread)
    return found


def factor(work: Array, seconds: Array, step_time: StepTime) -> float:
    """Return the median ratio of the steps' time to the time by step_time; 1 if step_time is 0 for
    all."""
    expected = work @ np.array(astuple(step_time))
    known = expected > 0
    return float(np.median(seconds[known] / expected[known])) if known.any() else 1.0


def _typical(work: Array) -> Array:
    """Return the work of a typical prefill and decode step, at least the mean of the steps seen;
    shape (2, 7)."""
    typical = _TYPICAL.copy()
    for kind, columns in enumerate((slice(0, 4), slice(4, 7))):
        seen = work[work[:, columns.start] > 0, columns]
        if len(seen):
            typical[kind, columns] = np.maximum(typical[kind, columns], seen.mean(axis=0))
    return typical


def _solved(
    work: Array, seconds: Array, counts: Array, known: Array, typical: Array, pull: float
) -> Array:
    """Return the non-negative least-squares solution of weighted rows. It is drawn to the known
    coefficients with the weight of `pull` typical steps in each column."""
    # The unit of each column is a typical step.
    typical_s = np.maximum(typical @ known, 1e-12)
    shares = (typical / typical_s[:, None]).sum(axis=0)
    columns = work / shares
    gram = columns.T @ (columns * counts[:, None]) + pull * np.eye(len(COLUMNS))
    target = columns.T @ (counts * seconds) + pull * known * shares
    solution: Array = _nonnegative_minimum(gram, target) / shares
    return solution


def _nonnegative_minimum(gram: Array, target: Array) -> Array:
    """Return the non-negative x that minimizes x'Gx / 2 - t'x; G is positive definite.

    With G = LL' the function is half the squared length of L'x - y, where Ly = t, plus a constant.
    """
    factor = np.linalg.cholesky(gram)
    return np.asarray(nnls(factor.T, np.linalg.solve(factor, target))[0], dtype=np.float64)
