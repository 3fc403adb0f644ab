"""The distribution of an answer's length in tokens, before it begins and while it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Source = Literal["history", "warm", "general", "prior", "hint", "truth", "none"]
# The minimum weight. A smaller difference between two sums of weights is a rounding error.
_LEAST_WEIGHT = 1e-12
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """Sorted distinct output lengths and their probabilities.

    lengths: int64, shape (n,), strictly increasing, each at least 1 token.
    weights: float64, shape (n,), each at least 1e-12, summing to 1.
    effective_samples: the number of equally weighted observations that it is worth (Kish), above 0.
    source: where it came from. "hint": a client gave it. "truth": only in a simulator.
        "none": nothing is known (UNKNOWN).
    """

    lengths: NDArray[np.int64]
    weights: NDArray[np.float64]
    effective_samples: float
    source: Source

    def __post_init__(self) -> None:
        """Raises ValueError unless the fields are as the class documents them."""
        if self.lengths.ndim != 1 or self.lengths.shape != self.weights.shape:
            raise ValueError(f"shapes {self.lengths.shape} and {self.weights.shape} do not match")
        if self.lengths.size == 0:
            raise ValueError("a length distribution needs at least one length")
        if self.lengths[0] < 1 or not (self.lengths[1:] > self.lengths[:-1]).all():
            raise ValueError("lengths must be at least 1 and strictly increasing")
        # Written so that NaN fails too.
        heavy_enough = self.weights.min() >= _LEAST_WEIGHT
        if not heavy_enough or not abs(float(self.weights.sum()) - 1.0) < 1e-6:
            raise ValueError(f"weights must be at least {_LEAST_WEIGHT} each and sum to 1")
        if not 0 < self.effective_samples < np.inf:
            raise ValueError(f"effective_samples is {self.effective_samples}, must be above 0")
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}, allowed: {', '.join(SOURCES)}")
        self.lengths.flags.writeable = False
        self.weights.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LengthDistribution)
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.weights, other.weights)
            and self.effective_samples == other.effective_samples
            and self.source == other.source
        )

    def as_fields(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a message."""
        return {
            "lengths": self.lengths.tolist(),
            "weights": self.weights.tolist(),
            "effective_samples": self.effective_samples,
            "source": self.source,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> LengthDistribution:
        """Make a distribution from the values of as_fields. Raises ValueError if they are
        malformed."""
        try:
            return cls(
                np.asarray(fields["lengths"], dtype=np.int64),
                np.asarray(fields["weights"], dtype=np.float64),
                float(fields["effective_samples"]),
                fields["source"],
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"malformed length distribution: {error!r}") from error

    @classmethod
    def from_samples(
        cls,
        lengths: Sequence[int] | NDArray[Any],
        source: Source,
        weights: Sequence[float] | NDArray[Any] | None = None,
        censored: Sequence[bool] | NDArray[Any] | None = None,
    ) -> LengthDistribution:
        """Make a distribution from observed lengths in tokens, in any order. Lengths may repeat.

        All arrays have shape (n,). A censored observation (cut off by its cap) says "at least this
        long". Its weight goes to the longer observations in proportion to their weights, which is
        the product-limit estimate (Efron 1967). If no observation is longer, it keeps its weight.
        Raises ValueError if there is no positive weight.
        """
        values = np.asarray(lengths, dtype=np.int64)
        mass = np.ones(values.size) if weights is None else np.asarray(weights, dtype=np.float64)
        if values.size == 0 or not mass.sum() > 0:
            raise ValueError("a length distribution needs at least one length of positive weight")
        effective = float(mass.sum() ** 2 / np.square(mass).sum())
        cut = np.zeros(values.size, bool) if censored is None else np.asarray(censored, bool)
        if cut.any():
            values, mass = _redistribute(values, mass, cut)
        return cls(*_merged(np.maximum(values, 1), mass), effective, source)

    def mean(self) -> float:
        return float(self.lengths @ self.weights)

    def quantile(self, q: float) -> int:
        """Return the smallest length whose cumulative probability reaches q, for q in [0, 1]."""
        reached = np.searchsorted(np.cumsum(self.weights), q - 1e-9)
        return int(self.lengths[min(int(reached), self.lengths.size - 1)])

    def crps(self, length: int) -> float:
        """Return the continuous ranked probability score in tokens (Gneiting and Raftery 2007).

            integral over x of (P(X <= x) - [length <= x])^2

        For a single predicted length, it is the absolute error.
        """
        steps = np.append(self.lengths, length)
        order = np.argsort(steps, kind="stable")
        x = steps[order].astype(float)
        below = np.cumsum(np.append(self.weights, 0.0)[order])
        return float(np.square(below[:-1] - (x[:-1] >= length)) @ np.diff(x))

    def has_within(self, length: int, share: float) -> bool:
        """Whether a length is in the central interval of this probability, both ends included."""
        return self.quantile(0.5 - share / 2) <= length <= self.quantile(0.5 + share / 2)

    def capped(self, max_tokens: int) -> LengthDistribution:
        """Return a copy with longer lengths cut to max_tokens (at least 1), the server's limit."""
        if self.lengths[-1] <= max_tokens:
            return self
        return self._rebuilt(np.minimum(self.lengths, max(max_tokens, 1)), self.weights)

    def scaled(self, factor: float) -> LengthDistribution:
        """Return a copy with all lengths times factor, in whole tokens, at least 1."""
        lengths = np.maximum(np.rint(self.lengths * factor), 1).astype(np.int64)
        return self._rebuilt(lengths, self.weights)

    def surviving(self, age_tokens: int) -> LengthDistribution | None:
        """Return the distribution given that the length exceeds age_tokens; None if no length
        does."""
        longer = self.lengths > age_tokens
        if not longer.any():
            return None
        return self._rebuilt(self.lengths[longer], self.weights[longer])

    def mixed(self, other: LengthDistribution, other_weight: float) -> LengthDistribution:
        """Return a mixture of this distribution and another, which has other_weight, in (0, 1).
        Keeps this one's source."""
        if not 0 < other_weight < 1:
            raise ValueError(f"other_weight is {other_weight}, must be between 0 and 1")
        return self._rebuilt(
            np.concatenate([self.lengths, other.lengths]),
            np.concatenate([self.weights * (1 - other_weight), other.weights * other_weight]),
        )

    def with_tail(self, max_tokens: int, factor: float = 2.0) -> LengthDistribution:
        """Return a copy with one more length: factor (at least 1) times the longest length seen.
        Its weight is the chance that the answer exceeds all lengths seen.

        Of n + 1 exchangeable draws, the last is the longest with probability 1 / (n + 1). No answer
        exceeds max_tokens, so there is no tail if a length has reached it.
        """
        longest = int(self.lengths[-1])
        if longest >= max_tokens:
            return self.capped(max_tokens)
        beyond = 1.0 / (self.effective_samples + 1.0)
        return self._rebuilt(
            np.append(self.lengths, min(round(factor * longest), max_tokens)),
            np.append(self.weights * (1 - beyond), beyond),
        )

    def compressed(self, max_atoms: int) -> LengthDistribution:
        """Return a copy with at most max_atoms lengths. Lengths are grouped into groups of equal
        probability, and each group becomes its mean length."""
        if self.lengths.size <= max_atoms:
            return self
        middle = np.cumsum(self.weights) - self.weights / 2
        group = np.minimum((middle * max_atoms).astype(np.int64), max_atoms - 1)
        mass = np.bincount(group, weights=self.weights)
        mean = np.bincount(group, weights=self.weights * self.lengths) / np.maximum(mass, 1e-300)
        used = mass > 0
        return self._rebuilt(np.rint(mean[used]).astype(np.int64), mass[used].astype(np.float64))

    def _rebuilt(
        self, lengths: NDArray[np.int64], weights: NDArray[np.float64]
    ) -> LengthDistribution:
        """Return the same evidence and source with other atoms, in any order."""
        return LengthDistribution(*_merged(lengths, weights), self.effective_samples, self.source)


@dataclass(frozen=True, slots=True, eq=False)
class Refined:
    """The distribution of an answer's length, refined after its first age_tokens tokens.

    lengths: of the whole answer, in tokens, not decreasing, shape (n,).
    weights: shape (n,), summing to 1. Lengths up to age_tokens have weight 0.
    """

    age_tokens: int
    lengths: Floats
    weights: Floats


def _merged(
    lengths: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return distinct lengths, without negligible ones; their weights sum to 1."""
    if lengths.size > 1 and not (lengths[1:] > lengths[:-1]).all():
        order = np.argsort(lengths, kind="stable")
        lengths, weights = lengths[order], weights[order]
        first = np.flatnonzero(np.diff(lengths, prepend=0))
        lengths, weights = lengths[first], np.add.reduceat(weights, first)
    shares: NDArray[np.float64] = weights / weights.sum()
    if shares.min() >= 2 * _LEAST_WEIGHT:
        return lengths.copy(), shares
    keep = shares >= 2 * _LEAST_WEIGHT
    return lengths[keep], shares[keep] / shares[keep].sum()


def _redistribute(
    values: NDArray[np.int64], mass: NDArray[np.float64], cut: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    # At equal length a finished answer comes before a censored one, which was longer.
    order = np.lexsort((cut, values))
    values, mass, cut = values[order], mass[order], cut[order]
    after = np.append(np.cumsum(mass[::-1])[::-1][1:], 0.0)
    given = cut & (after > 0)
    # The weight of a censored length makes each longer length heavier by the same factor.
    factors = np.where(given, 1.0 + mass / np.where(given, after, 1.0), 1.0)
    scale = np.append(1.0, np.cumprod(factors)[:-1])
    return values, np.where(given, 0.0, mass * scale)


# For requests without a prediction: SGLang's own, and those whose prediction was lost. Any length
# from 8 to 2,048 tokens is as likely as its double.
UNKNOWN = LengthDistribution.from_samples([8 << doublings for doublings in range(9)], "none")
