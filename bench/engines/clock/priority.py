"""Raises the priority over other processes on the host, so that a device clock is on time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NICENESS = -10
# Linux first divides the cores among sessions (sched(7), autogroup).
_SESSION = Path("/proc/self/autogroup")


def go_first() -> None:
    """Raise the priority of this process and its children, if permitted (mostly as root)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    take_place_of_session()


def take_place_of_session() -> None:
    """Raise the priority of this process's session too, if the process itself has a raised
    priority. Each new session needs this call."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness < 0:
        with contextlib.suppress(OSError):
            _SESSION.write_text(str(niceness), encoding="ascii")
