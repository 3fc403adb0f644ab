"""A score for prompts: about how long their answers are, from what was answered before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

# With fewer distinct prompts the regression fits noise.
MIN_PROMPTS = 30
# Anything from 1 to 10 does as well (leave-one-prompt-out error on six datasets).
_RIDGE = 3.0
# So many repeated answers tell how much answers to one prompt differ.
_MIN_REPEATS = 20
PRIOR_WORTH = 3.0
_LEAST_WORTH, _MOST_WORTH = 0.5, 8.0


@dataclass(frozen=True, slots=True, eq=False)
class LengthScore:
    """Ridge regression of the logarithm of output tokens on a prompt's vector.

    A score is used to find prompts whose answers are alike in length, not as a prediction: its
    errors are those of the records found by it too, so that the lengths found show them.

    weights: float64, shape (dimension + 1,), the last for the constant. center: mean logarithm.
    spread: standard deviation of the error at prompts left out.
    rest_worth: how many answers to the very same prompt weigh as much as all that is known from
        other prompts. Small where answers to one prompt hardly differ.
    """

    weights: NDArray[np.float64]
    center: float
    spread: float
    rest_worth: float

    def of(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores, float64, shape (n,), of vectors, shape (n, dimension): natural logarithms."""
        scores: NDArray[np.float64] = vectors @ self.weights[:-1] + self.weights[-1] + self.center
        return scores

    @classmethod
    def fit(
        cls,
        vectors: NDArray[np.float32],
        lengths: NDArray[np.int64],
        prompts: NDArray[np.int64],
    ) -> tuple[Self, NDArray[np.float64]] | None:
        """From n records: the score, and what each record would score had its prompt's answers
        not been seen, float64, shape (n,). None with too few distinct prompts.

        prompts: which prompt each record is of, numbers of any kind. Each counts once, with the
        mean logarithm of its lengths, so that leaving it out leaves out all its answers.
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
    """Twice the ratio of the variance within a prompt to that between prompts (a normal mean
    would need once, a distribution's shape needs more), and half an answer."""
    num_repeats = int((counts - 1).sum())
    if num_repeats < _MIN_REPEATS:
        return PRIOR_WORTH
    within = float(np.square(deviations).sum()) / num_repeats
    between = max(spread**2 - within * float(np.mean(1 / counts)), 0.1 * spread**2)
    return float(np.clip(0.5 + 2 * within / between, _LEAST_WORTH, _MOST_WORTH))
