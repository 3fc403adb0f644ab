"""What a second of serving a request is worth, as far as its length is foreseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from sage_sched.cost import Cost
from sage_sched.distribution import Floats, LengthDistribution


@dataclass(frozen=True, slots=True)
class Worth:
    """The worth of an answer whose length has a known distribution.

    The paper's density looks at the next token alone. But whoever prefills a prompt also buys its
    answer. With S(k) the share of answers of at least k tokens, serving one up to its K-th token
    is worth and costs, on average,

        V(K) = sum over k <= K of w(k) S(k) [token k is on time]
        C(K) = prefill + sum over k <= K of S(k) * what its k-th token takes

    and its density is the best V(K) / C(K), for K among the lengths of the distribution. A late
    answer catches up with its `first`-th token; those before it are worth nothing. Seconds are
    those of a cost model, which charges for memory and slots too.

    lengths: ascending. before: the length before each. survival: the share of answers that are
    longer than that. costs_s: the cost of an answer of each length. steps_s: of which since the
    length before. All of shape (lengths,).
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
        """The density at this age (0: nothing is prefilled).

        first: the number of the next token that is on time (1: the first token); all later ones are
            on time too. spent_s: the costs that have been spent already.
        """
        at = int(np.searchsorted(self.lengths, age, side="right"))
        if at == len(self.lengths):
            return 0.0
        # Shares of all answers, not of those that have come so far: the factor cancels out.
        survival, lengths = self.survival[at:], self.lengths[at:]
        before, costs_s = self.before[at:].copy(), self.steps_s[at:].copy()
        before[0], costs_s[0] = age, self.costs_s[at] - spent_s
        # How many tokens between one length and the next are on time.
        late = first - 1
        on_time = np.maximum(lengths, late) - np.maximum(before, late)
        gains = next_weight * survival * on_time
        if first <= 1 and age == 0:
            gains[0] += first_weight - next_weight
        spent = np.maximum((costs_s * survival).cumsum(), 1e-12)
        return float((gains.cumsum() / spent).max())
