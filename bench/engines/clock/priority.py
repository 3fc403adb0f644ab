"""Priority over other processes of the host, so that a device clock is on time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NICENESS = -10
# Linux shares the cores out among sessions first (sched(7), autogroup).
_SESSION = Path("/proc/self/autogroup")


def go_first() -> None:
    """Let this process and its children go first, if it may (as root, mostly)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    take_place_of_session()


def take_place_of_session() -> None:
    """Let this process's session go first too, if the process does. A new session needs it."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness < 0:
        with contextlib.suppress(OSError):
            _SESSION.write_text(str(niceness), encoding="ascii")
