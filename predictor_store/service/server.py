"""The event loop that serves a worker's clients over sockets: one inference server, or many."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterable

from predictor_store.service import http, lines
from predictor_store.service.connection import Connection
from predictor_store.service.sockets import set_up
from predictor_store.service.worker import Outgoing, Worker

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
# Between looks at whether a thread has loaded a history.
_LOADING_SECONDS = 0.02
# From the connection to a whole hello, or to the end of a first HTTP request.
_FIRST_SECONDS = 10.0
_MAX_CONNECTIONS = 256


class Server:
    """One thread. What a client does to its own connection, no other client notices."""

    def __init__(
        self,
        worker: Worker,
        listener: socket.socket | None = None,
        token: str = "",
        own: socket.socket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """token: what clients over TCP have to say. own: a connection to the process that this
        server ends with. clock: for the deadlines of clients."""
        self._worker = worker
        self._listener = listener
        self._token = token
        self._own = own
        self._clock = clock
        # The oldest first.
        self._clients: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._stopped = False

    def stop(self) -> None:
        """Makes run() return within a second. May be called in a signal handler."""
        self._stopped = True

    def run(self) -> None:
        """Serves until stop(), or until the process at the other end of `own` hangs up."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        if self._listener is not None:
            await asyncio.start_server(self._serve, sock=self._listener)
        if self._own is not None:
            streams = await asyncio.open_connection(sock=self._own)
            own = asyncio.create_task(self._serve(*streams))
            own.add_done_callback(lambda _: self._end())
        next_report = time.monotonic() + _REPORT_SECONDS
        while not self._stopped:
            await self._wait_for_work(next_report - time.monotonic())
            self._tell(self._worker.step())
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_SECONDS
                self._tell(self._worker.report())
                self._drop_the_late()

    def _end(self) -> None:
        self._stopped = True
        self._worker.heard.set()

    async def _wait_for_work(self, wait_s: float) -> None:
        """At most so long. The clients' tasks run meanwhile, if only for a turn."""
        await asyncio.sleep(0)
        if self._worker.busy:
            return
        self._worker.heard.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOADING_SECONDS if self._worker.loading else wait_s):
                await self._worker.heard.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, until it hangs up or is hung up on."""
        connection = Connection(next(self._numbers), reader, writer, self._clock)
        connected: socket.socket = writer.get_extra_info("socket")
        try:
            if not self._has_room():
                return
            self._clients[connection.number] = connection
            connection.allow(_FIRST_SECONDS)
            set_up(connected)
            first = await reader.read(1)
            talk = lines.talk if first == b"{" else http.talk
            token = self._token if connected.family != socket.AF_UNIX else ""
            await talk(connection, first, self._worker, token)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # it is gone, or says what has no end, or is late
        except Exception:
            logger.exception("a client is hung up on")
        finally:
            self._clients.pop(connection.number, None)
            self._worker.disconnect(connection.number)
            connection.hang_up()

    def _has_room(self) -> bool:
        """Whether one more client may come. If there are too many, the oldest that has not said the
        token is hung up on, so that strangers cannot keep others out."""
        if len(self._clients) < _MAX_CONNECTIONS:
            return True
        unknown = next((each for each in self._clients.values() if not each.is_known), None)
        if unknown is not None:
            self._drop(unknown)
        return unknown is not None

    def _tell(self, messages: Iterable[Outgoing]) -> None:
        for number, message in messages:
            if (client := self._clients.get(number)) is not None:
                client.tell(message)

    def _drop_the_late(self) -> None:
        for client in list(self._clients.values()):
            if client.is_late:
                self._drop(client)

    def _drop(self, client: Connection) -> None:
        del self._clients[client.number]
        client.stop_listening()
