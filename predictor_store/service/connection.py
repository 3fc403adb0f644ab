"""One client of a service: what it may send and be sent, and how long it may take; and an inference
server as one, which speaks predictor_store.service.protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from predictor_store.service import protocol
from predictor_store.service.worker import Worker

# A client that lets this much wait is hung. 4,000 predictions.
_MAX_UNSENT_BYTES = 8 << 20
# For a client to take in its last message, before the service hangs up.
_END_SECONDS = 5.0
# Of one client at a time, 40 predictions or 300 prompts; then others have their turn.
_PIECE_BYTES = 1 << 16


class Connection:
    """Used in the task that serves the client.

    number: the client's, for the worker. is_known: it has proven that it knows the service's token,
    if one is asked for; clients that have not make room for others. tell: called with each message
    of the worker to this client. deadline: of the task.
    """

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        deadline: asyncio.Timeout,
    ) -> None:
        self.number = number
        self.reader = reader
        self.is_known = False
        self.tell: Callable[[dict[str, Any]], None] = lambda message: None
        self.task = asyncio.current_task()
        self._writer = writer
        self._deadline = deadline

    @property
    def is_late(self) -> bool:
        return self._deadline.expired()

    def allow(self, seconds: float | None) -> None:
        """Sets the time for what comes next; None: no limit. No effect once it is late."""
        if not self.is_late:
            now_s = asyncio.get_running_loop().time()
            self._deadline.reschedule(None if seconds is None else now_s + seconds)

    def send(self, data: bytes) -> None:
        """Never blocks. Hangs up on a client that takes nothing in; nothing goes to one that is
        gone, as uvloop raises then."""
        if self._writer.is_closing():
            return
        self._writer.write(data)
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._writer.transport.abort()

    def end(self) -> None:
        """Tells the client that nothing more is sent. It has a few seconds to read the rest: if we
        closed while it still sends, it could not read it."""
        self.allow(_END_SECONDS)
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()


async def talk_in_lines(connection: Connection, first: bytes, worker: Worker, token: str) -> None:
    """Until the client hangs up.

    first: what was read of it already. token: what it must know; "": nothing. Raises OSError if it
    is gone, ValueError if a line is longer than protocol.MAX_LINE_BYTES.
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
    # expected: the client's proof, once it has said hello.
    piece, expected = first, ""
    while piece:
        for message in () if is_refused else lines.feed(piece):
            if is_refused:
                break
            if connection.is_known:  # the worker ignores clients that it does not know
                worker.receive(connection.number, message)
            elif not expected:
                answer, expected = _challenged(message, token)
                tell(answer)
            else:
                model = _proven(message, expected)
                connection.is_known = model is not None
                if model is None:
                    tell(protocol.refusal("the token is not the service's", "token"))
                else:
                    connection.allow(None)
                    tell(worker.connect(connection.number, model))
        await asyncio.sleep(0)
        piece = await connection.reader.read(_PIECE_BYTES)


def _challenged(hello: dict[str, Any] | None, token: str) -> tuple[dict[str, Any], str]:
    """The answer to the hello, and what the client must say next."""
    match hello:
        case {"hello": protocol.VERSION, "nonce": str(theirs)}:
            ours = protocol.nonce()
            proof = protocol.proof(token, "service", theirs, ours)
            answer = {"nonce": ours, "proof": proof, "version": protocol.VERSION}
            return answer, protocol.proof(token, "client", theirs, ours)
        case {"hello": version} if version != protocol.VERSION:
            why = (
                f"it speaks version {version!r:.40} of the protocol, this worker "
                f"{protocol.VERSION}: both need the same release of sage-sched"
            )
            return protocol.refusal(why, "version"), ""
    return protocol.refusal("its first message is no hello", "version"), ""


def _proven(message: dict[str, Any] | None, expected: str) -> str | None:
    """The model that the client names, if it has proven that it knows the token."""
    match message:
        case {"model": str(model), "proof": proof} if protocol.is_same(proof, expected):
            return model
    return None
