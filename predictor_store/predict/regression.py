"""Fits regressions of an answer's length on its prompt's vector: a server's own, and a shipped one.

Both predict the natural logarithm of output tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

# With fewer distinct prompts a regression fits noise.
MIN_PROMPTS = 30
# Values from 1 to 10 are equally good (leave-one-prompt-out error on six datasets).
_RIDGE = 3.0
# Fewer repeated answers do not show how much answers to one prompt differ.
_MIN_REPEATS = 20
PRIOR_WORTH = 3.0
# Scales a prompt's term of general lengths, relative to the numbers of its vector.
_GENERAL_SCALE = 3.5
_LEAST_WORTH, _MOST_WORTH = 0.5, 8.0
# The shipped regressions by encoder, fitted by bench/predictor/general.py.
SHIPPED_FILE = Path(__file__).with_name("general_length.json")
# No answer is predicted to be longer.
_MOST_TOKENS = 2.0**20


@dataclass(frozen=True, slots=True, eq=False)
class LengthScore:
    """Ridge regression on a server's own answers.

    A score is not used as a prediction. It finds prompts whose answers have similar lengths. A
    prediction from these lengths then includes the errors of the score.

    weights: float64, shape (dimension + 1,), the last for the constant.
    center: the mean logarithm.
    spread: the standard deviation of the error for prompts that were left out of the fit.
    rest_worth: how many answers to the very same prompt weigh as much as all other prompts; small
        if answers to one prompt hardly differ.
    """

    weights: NDArray[np.float64]
    center: float
    spread: float
    rest_worth: float

    def of(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the scores, float64, shape (n,), of vectors, shape (n, dimension)."""
        return np.asarray(vectors @ self.weights[:-1] + self.weights[-1] + self.center, np.float64)

    @classmethod
    def fit(
        cls, vectors: NDArray[np.float32], lengths: NDArray[np.int64], prompts: NDArray[np.int64]
    ) -> tuple[Self, NDArray[np.float64]] | None:
        """Fit a score to n records; None with fewer than MIN_PROMPTS distinct prompts.

        Return the score, and each record's score from a fit without its prompt's answers, float64,
        shape (n,).

        prompts: the prompt of each record, as numbers of any kind. Each prompt counts once, with
            the mean logarithm of its lengths, so that leaving it out leaves out all its answers.
        """
        distinct, first, of, counts = np.unique(
            prompts, return_index=True, return_inverse=True, return_counts=True
        )
        if distinct.size < MIN_PROMPTS:
            return None
        logs = np.log(np.maximum(lengths, 1))
        means = np.bincount(of, logs) / counts
        center = float(means.mean())
        x = np.column_stack([vectors[first], np.ones(first.size)]).astype(np.float64)
        inverse = np.linalg.inv(x.T @ x + _RIDGE * np.eye(x.shape[1]))
        weights = inverse @ (x.T @ (means - center))
        # Leaving one out of a linear smoother has a closed form (PRESS; Allen 1974).
        leverage = np.einsum("ij,ij->i", x @ inverse, x)
        errors = (means - center - x @ weights) / (1 - np.minimum(leverage, 0.99))
        spread = max(float(np.sqrt(np.mean(np.square(errors)))), 1e-3)
        score = cls(weights, center, spread, _rest_worth(logs - means[of], counts, spread))
        return score, (means - errors)[of]


def _rest_worth(deviations: NDArray[np.float64], counts: NDArray[np.int64], spread: float) -> float:
    """Return LengthScore.rest_worth: 0.5, plus twice the ratio of the variance within prompts to
    the variance between them. The ratio itself would be right for estimating only the mean of a
    normal distribution; the shape of a distribution needs more answers."""
    num_repeats = int((counts - 1).sum())
    if num_repeats < _MIN_REPEATS:
        return PRIOR_WORTH
    within = float(np.square(deviations).sum()) / num_repeats
    between = max(spread**2 - within * float(np.mean(1 / counts)), 0.1 * spread**2)
    return float(np.clip(0.5 + 2 * within / between, _LEAST_WORTH, _MOST_WORTH))


@dataclass(frozen=True, slots=True, eq=False)
class GeneralLength:
    """Predicts a length before any answer has ended. The logarithm of a length is the sum of a
    level, which differs from server to server, a term for the prompt, and an error.

    fingerprint: the fingerprint of the embedder that made the vectors.
    weights: float64, shape (dimension,), for a prompt's term.
    errors: equally likely errors, float64, rising.
    level: the level that is assumed before any answer has ended.
    level_worth: how many ended answers weigh as much as this level.
    logs: equally likely logarithms of an answer's length if prompt and server are unknown, float64,
        rising.
    """

    fingerprint: str
    weights: NDArray[np.float64]
    errors: NDArray[np.float64]
    level: float
    level_worth: float
    logs: NDArray[np.float64]

    @classmethod
    def shipped(cls, encoder: str) -> Self:
        """Return the shipped regression for prompts' vectors by this encoder."""
        fields: dict[str, Any] = json.loads(SHIPPED_FILE.read_text("ascii"))[encoder]
        arrays = {name: np.array(fields[name]) for name in ("weights", "errors", "logs")}
        return cls(**(fields | arrays))

    def of(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the prompts' terms, shape (n,), for vectors, shape (n, dimension)."""
        return np.asarray(vectors @ self.weights, np.float64)

    def level_after(self, total_excess: float, num: int) -> float:
        """Return the level after num answers have ended.

        total_excess: the sum of the logarithms of their lengths less their prompts' terms.
        """
        return (self.level * self.level_worth + total_excess) / (self.level_worth + num)

    def lengths(self, added: float, excess: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return equally likely lengths of an answer in tokens. The fewer answers have ended, the
        more these lengths vary."""
        level = self.level_after(float(excess.sum()), excess.size)
        widened = np.sqrt(1 + 1 / (self.level_worth + excess.size))
        return _tokens(level + added + widened * self.errors)

    def described(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the inputs of a LengthScore: the vectors, and their prompts' terms."""
        added = _GENERAL_SCALE * self.of(vectors).astype(np.float32)
        return np.concatenate([vectors, added[:, np.newaxis]], axis=1)

    def first_score(self) -> LengthScore:
        """Return the score to use until there are enough records for a fit."""
        weights = np.zeros(self.weights.size + 2)
        weights[-2] = 1 / _GENERAL_SCALE  # of the prompt's term; the last is the constant
        return LengthScore(weights, self.level, float(self.errors.std()), PRIOR_WORTH)

    def of_any_prompt(self) -> NDArray[np.int64]:
        """Return equally likely lengths, in tokens, of an answer to an unknown prompt."""
        return _tokens(self.logs)


def _tokens(logs: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.asarray(np.rint(np.clip(np.exp(logs), 1, _MOST_TOKENS)), np.int64)
