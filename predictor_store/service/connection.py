"""One client of a service: what it may send and be sent, and how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

# A client that lets this much wait is hung. 4,000 predictions.
_MAX_UNSENT_BYTES = 8 << 20
# For a client to take in its last message, before the service hangs up.
_END_SECONDS = 5.0


class Connection:
    """Used in the task that serves the client.

    number: the client's, for the worker. is_known: it has said the service's token, if one is asked
    for; clients that have not make room for others. tell: called with each message of the worker to
    this client. deadline: of the task.
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
        """Whether its time is over."""
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
