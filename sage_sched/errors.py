"""The error that a command prints in one line. Imports no package, as the command does."""

from __future__ import annotations


class UserError(Exception):
    """A value that the user gave is wrong, or something that the user asked for is not available.
    The message says which, so that a command prints it in one line, without a traceback."""
