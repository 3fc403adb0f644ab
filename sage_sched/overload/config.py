"""Settings of overload protection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from sage_sched.job import LEAST_SLO_MS, Hints

_DeadlineMs = Annotated[float, Meta(ge=LEAST_SLO_MS)]


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """The section `[overload]`."""

    enabled: bool = False
    """Refuse a request (status 429) that is predicted to miss its deadlines: its class's, or else
    the two below."""
    max_ttft_ms: _DeadlineMs = math.inf
    """TTFT deadline of requests that have none. `inf`: no deadline."""
    max_tpot_ms: _DeadlineMs = math.inf
    """TPOT deadline of requests that have none, as a mean over the answer. `inf`: no deadline."""

    def deadlines_s(self, hints: Hints) -> tuple[float, float]:
        """TTFT and TPOT deadlines of a request; inf for none."""
        ttft_ms, tpot_ms = hints.ttft_slo_ms, hints.tpot_slo_ms
        return (
            (self.max_ttft_ms if ttft_ms is None else ttft_ms) / 1e3,
            (self.max_tpot_ms if tpot_ms is None else tpot_ms) / 1e3,
        )
