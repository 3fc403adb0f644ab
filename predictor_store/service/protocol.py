"""Messages between HTTP processes and a prediction worker: one JSON object a line.

A client begins with one line and waits for the answer, which is one line:
    {"hello": VERSION, "model": name}, with "token" if the service asks for one
    {"ready": stats, "prior": distribution, "version": VERSION}, or {"refused": message, "because":
        "version", "token", "model", "store" or "busy"} and the end of the connection
From then on, to the worker:
    {"predict": handle, "text": str, "scope": str}, and "asked": predictor_store.predict.asked
    {"finished": handle, "input_tokens": int, "output_tokens": int, "censored": bool}
    {"goes_on": handle, "input_tokens": int, "output_tokens": int}: its answer has so many already
From the worker:
    {"predicted": handle, "distribution": distribution}
    {"stats": stats}, now and then, and "prior": distribution if that has changed
A distribution is the object of encode_distribution, or null if nothing is known. Each client has
handles of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sage_sched.distribution import LengthDistribution

VERSION = 3
# A prompt's excerpt has at most 48 KB, all of it escaped.
MAX_LINE_BYTES = 1 << 18
MAX_SCOPE_CHARS = 1_000


def hello(model: str, token: str = "") -> dict[str, Any]:
    return {"hello": VERSION, "model": model, "token": token}


def refusal(why: str, because: str) -> dict[str, Any]:
    """What a client is told instead of "ready"; its connection then ends."""
    return {"refused": why, "because": because}


def encode(message: dict[str, Any]) -> bytes:
    """As a line of ASCII: lone surrogates travel as escapes."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


class LineReader:
    """Puts lines together from the pieces that a socket yields."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[dict[str, Any] | None]:
        """The messages that piece completes; None for a line that is no JSON object. Raises
        ValueError if one gets longer than MAX_LINE_BYTES."""
        self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            yield message if isinstance(message, dict) else None
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a message of more than {MAX_LINE_BYTES} bytes")


def encode_distribution(distribution: LengthDistribution | None) -> dict[str, Any] | None:
    return None if distribution is None else distribution.as_fields()


def decode_distribution(encoded: dict[str, Any] | None) -> LengthDistribution | None:
    """From what a message has. Raises ValueError if it is malformed."""
    return None if encoded is None else LengthDistribution.from_fields(encoded)
