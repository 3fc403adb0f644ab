"""One peer on a socket, at either end: never blocks, and holds only so much for it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

# At a time: 40 predictions or 300 prompts, then others have their turn.
_MAX_RECEIVE_BYTES = 1 << 16
# 4,000 predictions: a peer that does not take them in is hung.
_MAX_UNSENT_BYTES = 8 << 20
# For a peer to take in its last message, before the service hangs up.
_END_SECONDS = 5.0


class Connection:
    """socket: connected. is_known, is_ending: of a service's clients.

    is_known: it has said the service's token, if one is asked for; clients that have not make room
        for others. is_ending: it is told nothing more, and what it says is ignored.
    """

    def __init__(
        self, connected: socket.socket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.is_known = False
        self.is_ending = False
        self._clock = clock
        self._deadline: float | None = None
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_late(self) -> bool:
        """Whether what it was allowed time for has not come."""
        return self._deadline is not None and self._clock() >= self._deadline

    def allow(self, seconds: float | None) -> None:
        """From now on, for what is to come next; None: any time."""
        self._deadline = None if seconds is None else self._clock() + seconds

    def receive(self) -> bytes:
        """What has come; b"" if nothing that counts. Raises OSError if the peer is gone."""
        try:
            piece = self.socket.recv(_MAX_RECEIVE_BYTES)
        except BlockingIOError:
            return b""
        if not piece:
            raise ConnectionResetError("the other side has hung up")
        return b"" if self.is_ending else piece

    def send(self, data: bytes) -> None:
        """Keeps what the socket does not take. Raises OSError if the peer is gone, or hung."""
        self._unsent += data
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ConnectionAbortedError("the other side takes nothing in")
        self.flush()

    def offer(self, data: bytes) -> bool:
        """Sends all of data, sooner or later, or nothing: False if the peer is so far behind that
        its buffer is full. Raises OSError if the peer is gone."""
        self.flush()
        if self._unsent:
            return False
        num_taken = self._taken(data)
        if num_taken:
            self._unsent += data[num_taken:]
        return num_taken > 0

    def end(self) -> None:
        """Hangs up once the peer has taken in what it was sent. If we closed while it still
        sends, it would not read that. Raises OSError if the peer is gone."""
        self.is_ending = True
        self.allow(_END_SECONDS)
        self.flush()

    def flush(self) -> None:
        """Sends on. Raises OSError if the peer is gone."""
        if self._unsent:
            del self._unsent[: self._taken(self._unsent)]
        if self.is_ending and not self._unsent:
            self.socket.shutdown(socket.SHUT_WR)

    def _taken(self, data: bytes | bytearray) -> int:
        with contextlib.suppress(BlockingIOError):
            return self.socket.send(data)
        return 0
