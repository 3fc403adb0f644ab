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

import numpy as np

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
    if distribution is None:
        return None
    return {
        "lengths": distribution.lengths.tolist(),
        "weights": distribution.weights.tolist(),
        "effective_samples": distribution.effective_samples,
        "source": distribution.source,
    }


def decode_distribution(encoded: dict[str, Any] | None) -> LengthDistribution | None:
    if encoded is None:
        return None
    return LengthDistribution(
        np.asarray(encoded["lengths"], np.int64),
        np.asarray(encoded["weights"], np.float64),
        encoded["effective_samples"],
        encoded["source"],
    )
