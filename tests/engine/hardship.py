"""An SGLang plugin for tests: causes the conditions of alerts on demand, by a file that it reads
while the server runs. Also has a policy that fails slowly."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.engines.server import plugins
from sage_sched.app.registry import ENTRY_POINT_GROUP
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView

_ORDERS = "HARDSHIP_ORDERS"
NOTHING = ""
LONG_WAITS = "all have waited for ten minutes more"
SLOW_MOVES = "each move out takes as long as it has been since the last one"
POLICY = "slow-and-wrong"


def install(folder: Path) -> dict[str, str]:
    """Make plugin and policy known to servers with this environment."""
    plugins.install_as(folder, POLICY, f"{__name__}:SlowAndWrong", ENTRY_POINT_GROUP)
    return plugins.install(folder, __name__) | {_ORDERS: str(orders_file(folder))}


def orders_file(folder: Path) -> Path:
    """The file of the server's orders."""
    return folder / "orders"


class Stall:
    """Takes half of the time, so that it is the same on a slow host."""

    def __init__(self) -> None:
        self._last_s = math.inf

    def __call__(self) -> None:
        """Sleep for the time that has passed since the last call."""
        time.sleep(max(0.5, min(20.0, time.monotonic() - self._last_s)))
        self._last_s = time.monotonic()


class SlowAndWrong(Policy):
    """Takes its time for a pass, and then fails."""

    stall = Stall()

    def on_pass(self, view: SchedulerView) -> None:
        self.stall()

    def key(self, job: Job, view: SchedulerView) -> float:
        raise ZeroDivisionError("a bug")


def register() -> None:
    """The entry point."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from patches.scheduler import kv_copy, metrics

    orders = Path(os.environ[_ORDERS])

    def ordered() -> str:
        return orders.read_text() if orders.exists() else NOTHING

    def perf_counter() -> float:
        return time.perf_counter() + (600.0 if ordered() == LONG_WAITS else 0.0)

    metrics.time = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        monotonic=time.monotonic, perf_counter=perf_counter
    )
    swap_out, stall = kv_copy.swap_out, Stall()

    def slow_swap_out(*args: Any) -> bool:
        if ordered() == SLOW_MOVES:
            stall()
        return swap_out(*args)

    kv_copy.swap_out = slow_swap_out
