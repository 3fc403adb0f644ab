"""Defines the error that a command prints in one line. This module imports no package, because the
command `sage-sched` imports none either."""

from __future__ import annotations


class UserError(Exception):
    """A value that the user gave is wrong, or something that the user asked for is not available.
    The message says what. A command prints it in one line, without a traceback."""
