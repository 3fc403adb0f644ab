"""Settings of overload protection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from sage_sched.fields import MOST
from sage_sched.job import LEAST_SLO_MS, Hints

_DeadlineMs = Annotated[float, Meta(ge=LEAST_SLO_MS)]


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """The section `[overload]`."""

    enabled: bool = False
    """Refuse requests predicted to miss the deadlines of their class, or else `max_ttft_ms` and
    `max_tpot_ms`. Clients can only tighten these."""
    max_ttft_ms: _DeadlineMs = math.inf
    """TTFT deadline of requests that have none. `inf`: no deadline."""
    max_tpot_ms: _DeadlineMs = math.inf
    """TPOT deadline of requests that have none, as a mean over the answer. `inf`: no deadline."""
    max_queued_tokens: Annotated[int, Meta(ge=0, le=MOST)] = 0
    """Refuse requests that would make more uncached prompt tokens wait, also without `enabled`.
    0: no cap."""

    @property
    def may_refuse(self) -> bool:
        """Whether any request may be refused."""
        return self.enabled or self.max_queued_tokens > 0

    def deadlines_s(
        self, hints: Hints, classes_ms: Mapping[str, tuple[float, float]]
    ) -> tuple[float, float]:
        """Return the TTFT and TPOT deadlines of a request; inf for none. A client can only tighten
        the operator's.

        classes_ms: the deadlines of each class, inf for none.
        """
        ttft_ms, tpot_ms = classes_ms.get(hints.slo_class, (math.inf, math.inf))
        return (
            _tighter_s(self.max_ttft_ms, ttft_ms, hints.ttft_slo_ms),
            _tighter_s(self.max_tpot_ms, tpot_ms, hints.tpot_slo_ms),
        )


def _tighter_s(overall_ms: float, of_class_ms: float, asked_ms: float | None) -> float:
    return min(overall_ms if of_class_ms == math.inf else of_class_ms, asked_ms or math.inf) / 1e3
