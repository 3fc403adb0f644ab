"""Measures the time that planning takes."""

from __future__ import annotations

from typing import Any

from patches.engine_types import Scheduler
from patches.listener import Listener
from patches.scheduler import queues
from sage_sched.plan import Plan


class PassMeter(Listener):
    """Counts passes, and records at which place each request joined the queue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_passes = 0
        self._num_too_long = 0
        self._total_s = 0.0
        self._longest_s = 0.0

    def planned(self, plan: Plan, seconds: float) -> None:
        self._num_passes += 1
        self._num_too_long += plan.num_too_long
        self._total_s += seconds
        self._longest_s = max(self._longest_s, seconds)
        waiting = queues.waiting(self._scheduler) if plan.places else []
        for position, num_before in plan.places.items():
            waits = waiting[position].sage.waits
            if waits.num_before is None:
                waits.num_before = num_before

    def stats(self) -> dict[str, Any]:
        """Return counters for /server_info.

        num_too_long: summed over all passes, the prompts that are ahead of the chunked one and too
            long to be prefilled with its chunk.
        """
        return {
            "num_passes": self._num_passes,
            "num_too_long": self._num_too_long,
            "mean_pass_ms": 1e3 * self._total_s / max(1, self._num_passes),
            "longest_pass_ms": 1e3 * self._longest_s,
        }
