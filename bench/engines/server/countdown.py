"""How long a comparison still takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Countdown:
    """By how long its runs should take, corrected by how long the ones that are over took."""

    def __init__(
        self, expected_s: Sequence[float], now: Callable[[], float] = time.monotonic
    ) -> None:
        """expected_s: of each run, in their order. The first begins now."""
        self._expected_s = list(expected_s)
        self._num_over = 0
        self._now = now
        self._began_s = now()

    def next_run(self) -> None:
        """The run is over."""
        self._num_over += 1

    def left_s(self) -> float:
        """At the beginning of a run."""
        over_s = sum(self._expected_s[: self._num_over])
        pace = (self._now() - self._began_s) / over_s if over_s else 1.0
        return pace * sum(self._expected_s[self._num_over :])

    def __str__(self) -> str:
        left_s = self.left_s()
        about = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        return f"run {self._num_over + 1} of {len(self._expected_s)}, about {about} left"
