"""The event loop that serves a worker's clients over sockets: one inference server, or many."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Iterable

from predictor_store.service import http, sockets
from predictor_store.service.connection import Connection, talk_in_lines
from predictor_store.service.worker import Outgoing, Worker

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
# From the connection to a whole hello, or to the end of a first HTTP request.
_FIRST_SECONDS = 10.0
_MAX_CONNECTIONS = 256


class Server:
    """One thread. Whatever a client does to its own connection, the others do not notice."""

    def __init__(
        self,
        worker: Worker,
        listener: socket.socket | None = None,
        token: str = "",
        own: socket.socket | None = None,
    ) -> None:
        """token: what clients over TCP have to say. own: a connection to the process that this
        server ends with."""
        self._worker = worker
        self._listener = listener
        self._token = token
        self._own = own
        # The oldest first.
        self._clients: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._stopped = False
        self._hurries = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Makes run() return. May be called in a signal handler, or another thread."""
        self._stopped = True
        self._wake()

    def hurry(self) -> None:
        """From now on, what is heard is written at once. May be called as stop() may."""
        self._hurries = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._worker.heard.set)

    def run(self) -> None:
        """Serves until stop(), or until the process at the other end of `own` hangs up. Then it no
        longer listens."""
        # Whatever loop the process prefers: uvloop's goes by a clock of its own.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            try:
                runner.run(self._run())
            finally:
                if self._listener is not None:
                    sockets.close(self._listener)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._listener is not None:
            await asyncio.start_server(self._serve, sock=self._listener)
        if self._own is not None:
            streams = await asyncio.open_connection(sock=self._own)
            own = asyncio.create_task(self._serve(*streams))
            own.add_done_callback(lambda _: self._end())
        next_report = time.monotonic() + _REPORT_SECONDS
        while not self._stopped:
            await self._wait_for_work(next_report - time.monotonic())
            self._worker.heard.clear()
            self._tell(self._worker.step())
            if self._hurries or time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_SECONDS
                self._tell(self._worker.report())

    def _end(self) -> None:
        self._stopped = True
        self._worker.heard.set()

    async def _wait_for_work(self, wait_s: float) -> None:
        """Waits for at most so long. Clients' tasks get a turn in any case."""
        await asyncio.sleep(0)
        if self._worker.busy:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._worker.heard.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, until it hangs up or is hung up on."""
        number = next(self._numbers)
        connected: socket.socket = writer.get_extra_info("socket")
        token = self._token if connected.family != socket.AF_UNIX else ""
        try:
            async with asyncio.timeout(_FIRST_SECONDS) as deadline:
                if self._has_room():
                    client = self._clients[number] = Connection(number, reader, writer, deadline)
                    sockets.set_up(connected)
                    first = await reader.read(1)
                    talk = talk_in_lines if first == b"{" else http.talk
                    await talk(client, first, self._worker, token)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # it is gone, or late, or says what has no end
        except Exception:
            logger.exception("a client is hung up on")
        finally:
            self._clients.pop(number, None)
            self._worker.disconnect(number)
            writer.transport.abort()

    def _has_room(self) -> bool:
        """Whether one more client may come. If there are too many, the oldest that has not said the
        token is hung up on, so that strangers cannot keep others out."""
        if len(self._clients) < _MAX_CONNECTIONS:
            return True
        for number, client in self._clients.items():
            if not client.is_known and client.task is not None:
                client.task.cancel()
                del self._clients[number]
                return True
        return False

    def _tell(self, messages: Iterable[Outgoing]) -> None:
        for number, message in messages:
            if (client := self._clients.get(number)) is not None:
                client.tell(message)
