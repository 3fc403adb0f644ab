"""Measures the host, to choose the speed of a device clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bench.engines.clock.device import MAX_LATE_SHARE
from bench.engines.clock.priority import go_first

# The first is the highest that a good host keeps up with.
SPEEDS = (6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.75, 0.5)
_NUM_PIECES = 150
_PAUSE_S = 0.005
# Such a loop takes as much CPU as a step of the demo's scheduler: 5 ms where both were measured.
_LOOPS_PER_STEP = 280_000


def step_times_s(
    work: Callable[[], object] | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """Return how long the host takes for each of many pieces of work, with pauses in between, as a
    server's steps have. It takes one to ten seconds.

    work: one piece; None for a loop that needs as much CPU as a step of a server.
    """
    go_first()  # as servers on a device clock
    work = work or (lambda: sum(range(_LOOPS_PER_STEP)))
    found = []
    for _ in range(_NUM_PIECES):
        sleep(_PAUSE_S)
        began_s = now()
        work()
        found.append(now() - began_s)
    return found


def speed_for(steps_s: Sequence[float], device_step_s: float) -> float:
    """Return the highest of SPEEDS at which steps of these times do not delay a device for longer
    than is allowed; the lowest if there is none.

    device_step_s: the time of a step on the device, in real time.
    """
    for speed in SPEEDS:
        at_s = device_step_s / speed
        late_s = sum(max(0.0, step_s - at_s) for step_s in steps_s)
        if late_s <= MAX_LATE_SHARE * at_s * len(steps_s):
            return speed
    return SPEEDS[-1]
