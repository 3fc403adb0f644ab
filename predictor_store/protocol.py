"""Messages between the HTTP process and the prediction worker: one JSON object a line.

To the worker:
    {"predict": handle, "text": str, "scope": str}
    {"finished": handle, "input_tokens": int, "output_tokens": int, "censored": bool}
From the worker:
    {"ready": stats, "prior": distribution}, or {"refused": message} and its end, at the start
    {"predicted": handle, "distribution": distribution}
    {"prior": distribution, "stats": stats}, now and then
A distribution is the object of encode_distribution, or null where nothing is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sage_sched.distribution import LengthDistribution


def encode(message: dict[str, Any]) -> bytes:
    """As a line of ASCII: lone surrogates travel as escapes."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


class LineReader:
    """Puts lines together from the pieces that a socket yields."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[dict[str, Any] | None]:
        """The messages that piece completes; None for a line that is no JSON object."""
        self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            yield message if isinstance(message, dict) else None


def encode_distribution(distribution: LengthDistribution | None) -> dict[str, Any] | None:
    """As a message has it; null if nothing is known."""
    return None if distribution is None else distribution.as_fields()


def decode_distribution(encoded: dict[str, Any] | None) -> LengthDistribution | None:
    """From what a message has. Raises ValueError if it is malformed."""
    return None if encoded is None else LengthDistribution.from_fields(encoded)
