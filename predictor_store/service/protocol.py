"""Messages between HTTP processes and a prediction worker: one JSON object a line.

They begin in turns, a line each. Each proves that it knows the token (see proof) and never says it.
The client says no more than its nonce until the service has done so:
    {"hello": VERSION, "nonce": str}
    {"nonce": str, "proof": str, "version": VERSION}
    {"model": name, "proof": str}
    {"ready": stats, "prior": distribution, "version": VERSION}
In place of either answer: {"refused": message, "because": "version", "token", "model", "store" or
"busy"} and the end of the connection. From then on, to the worker:
    {"predict": handle, "text": str, "scope": str}, and "asked": predictor_store.predict.asked
    {"finished": handle, "input_tokens": int, "output_tokens": int, "censored": bool}, and
        "stopped": true if what the client asked for ended it (predictor_store.predict.asked.Scope)
    {"goes_on": handle, "input_tokens": int, "output_tokens": int}: its answer has so many already
From the worker:
    {"predicted": handle, "distribution": distribution}
    {"stats": stats}, now and then, and "prior": distribution if that has changed
A distribution is the object of encode_distribution, or null if nothing is known. Each client has
handles of its own.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from sage_sched.distribution import LengthDistribution

VERSION = 4
# A prompt's excerpt has at most 48 KB, all of it escaped.
MAX_LINE_BYTES = 1 << 18
MAX_SCOPE_CHARS = 1_000


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Stats(msgspec.Struct, frozen=True):
    """ModelHistory.stats(), as a worker has sent it."""

    process: int
    num_records: _Count = 0
    num_unwritten: _Count = 0
    num_recorded: _Count = 0
    num_going_on: _Count = 0
    num_unrecorded: _Count = 0
    num_dropped: _Count = 0
    num_malformed: _Count = 0
    num_lost: _Count = 0
    quality: dict[str, bool | _Count | float] = {}

    @classmethod
    def decode(cls, said: object) -> Stats:
        """Raises ValueError."""
        return msgspec.convert(said, cls)


def nonce() -> str:
    return secrets.token_hex(16)


def hello(nonce: str) -> dict[str, Any]:
    return {"hello": VERSION, "nonce": nonce}


def proof(token: str, whose: Literal["client", "service"], clients: str, services: str) -> str:
    """That it knows the token. clients, services: their nonces."""
    said = json.dumps([whose, clients, services]).encode("ascii")
    return hmac.new(token.encode("ascii"), said, "sha256").hexdigest()


def is_same(said: object, secret: str) -> bool:
    """The time it takes does not depend on how much of it is right."""
    if not isinstance(said, str):
        return False
    return hmac.compare_digest(said.encode("utf-8", "replace"), secret.encode("utf-8", "replace"))


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
