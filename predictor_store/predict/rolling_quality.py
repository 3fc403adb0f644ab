"""How good predictions have been lately, and whether they are worth more than none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import LengthDistribution

# So many answers decide.
WINDOW = 500
# Of fewer nothing can be said.
LEAST_TO_TELL = 50


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was known of an answer before it began.

    said: by the prompt; None where nothing is known. blind: the distribution of all lengths at
    that time.
    """

    said: LengthDistribution | None
    blind: LengthDistribution | None


@dataclass(frozen=True, slots=True)
class _Scored:
    source: str
    mean: float
    length: int
    crps: float
    blind_crps: float
    within_80: bool
    was_late: bool


class RollingQuality:
    """Of the last WINDOW answers that came to their own end.

    widened: over WINDOW answers on end, predictions were worse (by CRPS) than the distribution of
    all lengths, and have not been better over as many since: that is to be served in their place.
    What would have been said goes on being scored.
    """

    def __init__(self) -> None:
        self.widened = False
        self._scored = deque[_Scored](maxlen=WINDOW)
        # Answers since `widened` has changed.
        self._num_since = 0
        self._summary: dict[str, Any] | None = None

    def add(self, forecast: Forecast, output_tokens: int, was_late: bool) -> bool:
        """An answer that came to its own end; whether `widened` has changed by it. was_late: its
        request had gone on without the forecast."""
        said, blind = forecast.said, forecast.blind
        if said is None or blind is None:
            return False
        self._scored.append(
            _Scored(
                said.source,
                said.mean(),
                output_tokens,
                said.crps(output_tokens),
                blind.crps(output_tokens),
                said.has_within(output_tokens, 0.8),
                was_late,
            )
        )
        self._num_since += 1
        self._summary = None
        if self._num_since < WINDOW:
            return False
        excess = sum(scored.crps - scored.blind_crps for scored in self._scored)
        changes = excess < 0 if self.widened else excess > 0
        if changes:
            self.widened = not self.widened
            self._num_since = 0
        return changes

    def summary(self) -> dict[str, Any]:
        """Of all, and by the source of what was said: of how many answers, mean CRPS in tokens and
        its gain over the blind distribution's, the share in the central 80 %, Spearman's rho of
        the mean, and how many went on without."""
        if self._summary is None:
            self._summary = self._summarized()
        return self._summary

    def _summarized(self) -> dict[str, Any]:
        sources = sorted({scored.source for scored in self._scored})
        by_source = {
            source: _summary([scored for scored in self._scored if scored.source == source])
            for source in sources
        }
        return {"widened": self.widened, **_summary(list(self._scored)), "by_source": by_source}


def _summary(scored: Sequence[_Scored]) -> dict[str, Any]:
    if not scored:
        return {"num_answers": 0}
    crps = float(np.mean([each.crps for each in scored]))
    blind = float(np.mean([each.blind_crps for each in scored]))
    rho = spearman(
        np.array([each.mean for each in scored]), np.array([each.length for each in scored], float)
    )
    return {
        "num_answers": len(scored),
        "crps": round(crps, 2),
        "blind_crps": round(blind, 2),
        "crps_gain": round(1 - crps / blind, 3) if blind > 0 else 0.0,
        "within_80": round(float(np.mean([each.within_80 for each in scored])), 3),
        "spearman": round(rho, 3),
        "num_late": sum(each.was_late for each in scored),
    }


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Correlation of ranks, ties sharing theirs; 0 where either is constant."""
    ranks = np.stack([_ranks(x), _ranks(y)])
    ranks -= ranks.mean(1, keepdims=True)
    norm = float(np.sqrt(np.prod(np.square(ranks).sum(1))))
    return float(ranks[0] @ ranks[1]) / norm if norm > 0 else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, of, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: NDArray[np.float64] = (last - (counts - 1) / 2)[of]
    return middle
