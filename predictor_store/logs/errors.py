"""What is wrong with a file, or with a row of it."""

from __future__ import annotations

from sage_sched.fields import UserError


class DatasetError(UserError):
    """The file cannot be read at all; the message names it and says why."""


class RowError(Exception):
    """One row is left out.

    kind: why, as people count it: "12 failed". detail: what is special to this row.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class NoRequestError(Exception):
    """The row is sound, and is no request with an answer: a span, an event, a header."""
