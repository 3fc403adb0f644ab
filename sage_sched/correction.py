"""How much longer than foreseen answers turn out to be: what admission learns of its forecasts."""

from __future__ import annotations

import math

# How far an average answer moves the factor (the logarithm of it): some hundred of them see through
# forecasts that are five times too long.
_STEP = 0.05
_MOST_FACTOR = 16.0
# Admission goes by the factor in steps of this size, so that chance, which moves that of right
# forecasts too, mostly does not reach it.
_ROUNDED_TO = math.log(2) / 2
# An answer counts by its forecast, in averages of the last fifty or so.
_MEAN_RATE = 0.02
_MOST_WEIGHT = 4.0


class Correction:
    """A factor by which to take a quantile of lengths as foreseen, so that it is one.

    Each answer that ends moves the factor a little: up if it was longer than the corrected quantile
    said, down if it was not, so that it comes to rest where the right share of them is longer
    (quantile tracking; Gibbs and Candes 2021). Answers count by their forecasts, as memory is what
    is counted on: if all counted alike, the many short ones, which an order by forecasts serves
    first, would decide (H800 preset, right forecasts at 8 requests/s: mean TTLT 1 to 3 % higher).
    What comes of it depends on the answers and their order alone, which all ranks share.

    factor: what admission goes by. num_answers: so many have counted.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._log = 0.0
        self._mean_tokens = 0.0
        self.num_answers = 0
        self.factor = 1.0

    @property
    def exact_factor(self) -> float:
        """Before rounding."""
        return math.exp(self._log)

    def stats(self) -> dict[str, float]:
        """For a server's counters."""
        return {"factor": self.factor, "num_answers": self.num_answers}

    def ended(self, foreseen_tokens: int, answer_tokens: int, cap_tokens: int) -> None:
        """An answer has ended, by itself or at its cap. foreseen_tokens: the quantile of its length
        at its arrival, as it was foreseen."""
        said_tokens = foreseen_tokens * self.exact_factor
        if answer_tokens >= cap_tokens and said_tokens >= cap_tokens:
            return  # whether it would have been longer than was said, nobody knows
        self.num_answers += 1
        rate = max(1 / self.num_answers, _MEAN_RATE)
        self._mean_tokens += rate * (foreseen_tokens - self._mean_tokens)
        weight = min(foreseen_tokens / self._mean_tokens, _MOST_WEIGHT)
        was_longer = answer_tokens > said_tokens
        moved = self._log + _STEP * weight * (was_longer - (1 - self._quantile))
        self._log = min(max(moved, -math.log(_MOST_FACTOR)), math.log(_MOST_FACTOR))
        self.factor = math.exp(round(self._log / _ROUNDED_TO) * _ROUNDED_TO)
