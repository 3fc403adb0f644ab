"""A worker's end of the socket to one client: never blocks, and holds only so much."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from predictor_store import protocol

# At a time: 300 prompts, then others have their turn.
_MAX_RECEIVE_BYTES = 1 << 16
# 4,000 predictions: who does not take them is hung.
_MAX_UNSENT_BYTES = 8 << 20


class Connection:
    """refused: it is told so, and then hung up. silent_until: when it is hung up on, unless it has
    said something by then; None: it has."""

    def __init__(self, connected: socket.socket, silent_until: float | None = None) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.refused = False
        self.silent_until = silent_until
        self._lines = protocol.LineReader()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def begins_like_http(self) -> bool:
        """Whether what it says first is no message. Raises OSError where the other side is gone."""
        return self.socket.recv(1, socket.MSG_PEEK) not in (b"{", b"")

    def receive(self) -> Iterator[dict[str, Any] | None]:
        """The messages that are there, None for a line that is none. Raises OSError where the
        other side is gone, ValueError where it sends what has no end."""
        try:
            piece = self.socket.recv(_MAX_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not piece:
            raise ConnectionResetError("the other side has hung up")
        yield from self._lines.feed(piece)

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError where the other side is gone, or hung."""
        self._unsent += protocol.encode(message)
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ConnectionAbortedError("the other side takes nothing in")
        self.flush()

    def flush(self) -> None:
        """Raises OSError where the other side is gone."""
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: self.socket.send(self._unsent)]
