"""A client of a service that speaks predictor_store.service.protocol: an inference server."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from predictor_store.service import protocol
from predictor_store.service.connection import Connection
from predictor_store.service.worker import Worker

# Of one client at a time, 40 predictions or 300 prompts; then others have their turn.
_PIECE_BYTES = 1 << 16


async def talk(connection: Connection, first: bytes, worker: Worker, token: str) -> None:
    """Until the client hangs up.

    first: what was read of it already. token: what it must say in its hello; "": nothing. Raises
    OSError if it is gone, ValueError if a line is longer than protocol.MAX_LINE_BYTES.
    """

    is_refused = False

    def tell(message: dict[str, Any]) -> None:
        nonlocal is_refused
        connection.send(protocol.encode(message))
        if "refused" in message:
            is_refused = True
            connection.end()

    connection.tell = tell
    lines = protocol.LineReader()
    piece, has_greeted = first, False
    while piece:
        for message in () if is_refused else lines.feed(piece):
            if has_greeted:  # the worker ignores clients that it does not know
                worker.receive(connection.number, message)
            elif (refusal := _refusal(message, token)) is not None:
                tell(refusal)
            elif message is not None:
                connection.is_known = True
                connection.allow(None)
                tell(worker.connect(connection.number, message["model"]))
            has_greeted = True
        await asyncio.sleep(0)
        piece = await connection.reader.read(_PIECE_BYTES)


def _refusal(hello: dict[str, Any] | None, token: str) -> dict[str, Any] | None:
    match hello:
        case {"hello": protocol.VERSION, "model": str(), **rest}:
            if token and not is_same(rest.get("token"), token):
                return protocol.refusal("the token is not the service's", "token")
            return None
        case {"hello": version} if version != protocol.VERSION:
            why = (
                f"it speaks version {version!r:.40} of the protocol, this worker "
                f"{protocol.VERSION}: both need the same release of sage-sched"
            )
            return protocol.refusal(why, "version")
    return protocol.refusal("its first message is no hello", "version")


def is_same(said: object, token: str) -> bool:
    """Whether it is the token. The time it takes does not depend on how much of it is right."""
    if not isinstance(said, str):
        return False
    return hmac.compare_digest(said.encode("utf-8", "replace"), token.encode("utf-8", "replace"))
