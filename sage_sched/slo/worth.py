"""What serving a request on is worth by second, as far as its length is foreseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sage_sched.cost import Cost
from sage_sched.distribution import LengthDistribution

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Worth:
    """Of a request whose answer has a length O of a known distribution, of which it has `age`.

    The paper's density looks at the next token alone. Whoever prefills a prompt buys the answer
    with it: with S(k) the share of answers of at least k tokens, serving it up to its K-th token
    is worth and costs, on average,

        V(K) = sum over k <= K of w(k) S(k) [token k is on time]
        C(K) = prefill + sum over k <= K of S(k) * what its k-th token takes

    and its density is the best V(K) / C(K). Late by so many tokens that it catches up with the
    `first`-th, it has nothing of those before. Seconds are those of a cost model, which charges
    room too. Computed at the lengths that the distribution knows.

    lengths: ascending. before: the length before each. survival: the share of answers that are
    longer than that. costs_s: what an answer has cost by each length. steps_s: since that before.
    All of shape (lengths,).
    """

    lengths: Floats
    before: Floats
    survival: Floats
    costs_s: Floats
    steps_s: Floats

    @classmethod
    def of(
        cls, known: LengthDistribution, cost: Cost, input_tokens: int, cached_tokens: int = 0
    ) -> Self:
        """known: with its tail, up to the cap."""
        lengths = known.lengths.astype(np.float64)
        weights = np.asarray(known.weights, np.float64)
        survival = np.cumsum(weights[::-1])[::-1]
        costs_s = np.asarray(cost(input_tokens, lengths, cached_tokens), np.float64)
        before = np.concatenate(([0.0], lengths[:-1]))
        return cls(lengths, before, survival, costs_s, np.diff(costs_s, prepend=0.0))

    def density(
        self, first_weight: float, next_weight: float, age: int, first: int, spent_s: float
    ) -> float:
        """What it is worth by second, at this age (0: nothing is prefilled).

        first: which token (1: its first) is the next one that is on time; those from there on are.
        spent_s: of the costs, what has been spent already.
        """
        at = int(np.searchsorted(self.lengths, age, side="right"))
        if at == len(self.lengths):
            return 0.0
        # Shares of those that have come so far: that they are shares of all cancels out.
        survival, lengths = self.survival[at:], self.lengths[at:]
        before, costs_s = self.before[at:].copy(), self.steps_s[at:].copy()
        before[0], costs_s[0] = age, self.costs_s[at] - spent_s
        # Of the tokens between one length and the next, those that are on time.
        late = first - 1
        on_time = np.maximum(lengths, late) - np.maximum(before, late)
        gains = next_weight * survival * on_time
        if first <= 1 and age == 0:
            gains[0] += first_weight - next_weight
        spent = np.maximum((costs_s * survival).cumsum(), 1e-12)
        return float((gains.cumsum() / spent).max())
