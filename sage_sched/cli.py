"""The entry of the command `sage-sched`. It imports little, because Ctrl-C in Python's imports ends
in a traceback, or in an error of the package that is being imported."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from functools import partial


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line argv (without the program's name), and return the exit status. Until the
    command begins, Ctrl-C ends the process at once."""
    handler = signal.getsignal(signal.SIGINT)
    begins: Callable[[], object] = lambda: None  # noqa: E731
    if handler is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # only a process's first thread may set a handler
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            begins = partial(signal.signal, signal.SIGINT, handler)
    from sage_sched.commands import run

    return run(argv, begins)
