"""A service's end of the socket to one client: never blocks, and holds only so much."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

# At a time: 300 prompts, then others have their turn.
_MAX_RECEIVE_BYTES = 1 << 16
# 4,000 predictions: who does not take them is hung.
_MAX_UNSENT_BYTES = 8 << 20
# In which it takes in what it was sent last, and hangs up.
_END_SECONDS = 5.0


class Connection:
    """is_known: whether the service's token was said, where one is asked for. Those that are not
    make room for others. is_ending: nothing more is said to it, or heard of what it says."""

    def __init__(self, connected: socket.socket, clock: Callable[[], float]) -> None:
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
        """From now on, for what is to come next; None: it may come whenever it likes."""
        self._deadline = None if seconds is None else self._clock() + seconds

    def receive(self) -> bytes:
        """What is there; b"" if nothing is that counts. Raises OSError where the other side is
        gone."""
        try:
            piece = self.socket.recv(_MAX_RECEIVE_BYTES)
        except BlockingIOError:
            return b""
        if not piece:
            raise ConnectionResetError("the other side has hung up")
        return b"" if self.is_ending else piece

    def send(self, data: bytes) -> None:
        """Raises OSError where the other side is gone, or hung."""
        self._unsent += data
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ConnectionAbortedError("the other side takes nothing in")
        self.flush()

    def end(self) -> None:
        """It hangs up when it has taken in what it was sent. Who still sends would not read that
        if we did. Raises OSError where it is gone."""
        self.is_ending = True
        self.allow(_END_SECONDS)
        self.flush()

    def flush(self) -> None:
        """Raises OSError where the other side is gone."""
        if self._unsent:
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self.socket.send(self._unsent)]
        if self.is_ending and not self._unsent:
            self.socket.shutdown(socket.SHUT_WR)
