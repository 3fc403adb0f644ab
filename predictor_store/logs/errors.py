"""Defines the errors of a file, and of its rows."""

from __future__ import annotations

from sage_sched.errors import UserError


class DatasetError(UserError):
    """The file cannot be read at all; the message names it and says why."""


class RowError(Exception):
    """One row is left out.

    kind: the reason, worded for the summary: "that failed", as in "12 that failed". detail: the
        values of this row.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class NoRequestError(Exception):
    """The row is sound, but not a request with an answer: for example a span or a header."""
