"""Serves a worker's clients over sockets: those of one server, or of many."""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import time
from collections.abc import Iterable

from predictor_store.connection import Connection
from predictor_store.json_requests import JsonRequests
from predictor_store.worker import Outgoing, Worker

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
# While a history is read in a thread.
_LOADING_SECONDS = 0.02
# By then a client has to have said something.
_SILENT_SECONDS = 10.0
_MAX_CONNECTIONS = 256
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Server:
    """One thread. What a client does to its own connection, no other notices."""

    def __init__(
        self, worker: Worker, listener: socket.socket | None = None, token: str = ""
    ) -> None:
        """token: what clients over TCP have to say."""
        self._worker = worker
        self._token = token
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._lifeline: int | None = None
        self._stopped = False
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, _READ)
            self._json_requests = JsonRequests(listener)

    def add(self, connected: socket.socket) -> None:
        """A client that was there before; when it hangs up, the server ends."""
        self._lifeline = self._add(connected, silent_until=None)

    def stop(self) -> None:
        """From a signal's handler, say: run() returns within a second."""
        self._stopped = True

    def run(self) -> None:
        next_report = time.monotonic() + _REPORT_SECONDS
        while not self._stopped:
            wait_s = max(next_report - time.monotonic(), 0.0)
            if self._worker.loading:
                wait_s = min(wait_s, _LOADING_SECONDS)
            self._take_in(0.0 if self._worker.busy else wait_s)
            self._send(self._worker.step())
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_SECONDS
                self._send(self._worker.report())
                self._drop_the_silent()

    def close(self) -> None:
        """Hang up on all."""
        for number in list(self._connections):
            self._hang_up(number)
        self._selector.close()

    def _take_in(self, wait_s: float) -> None:
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._connections:
                self._serve(key.data, events)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except OSError as error:  # gone again, or too many files are open
            logger.warning("a client could not be taken in: %s", error)
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            connected.close()
        else:
            self._add(connected, time.monotonic() + _SILENT_SECONDS)

    def _add(self, connected: socket.socket, silent_until: float | None) -> int:
        number = next(self._numbers)
        over_tcp = connected.family != socket.AF_UNIX
        if over_tcp:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[number] = Connection(connected, silent_until)
        self._selector.register(connected, _READ, number)
        self._worker.connect(number, self._token if over_tcp else None)
        return number

    def _serve(self, number: int, events: int) -> None:
        connection = self._connections[number]
        try:
            if events & _WRITE:
                connection.flush()
                self._watch(number, connection)
            if not events & _READ:
                return
            if connection.silent_until is not None and connection.begins_like_http():
                self._forget(number)
                self._json_requests.take(connection.socket)
                return
            connection.silent_until = None
            for message in connection.receive():
                self._worker.receive(number, message)
        except (OSError, ValueError):
            self._hang_up(number)

    def _send(self, messages: Iterable[Outgoing]) -> None:
        for number, message in messages:
            connection = self._connections.get(number)
            if connection is None or connection.refused:
                continue
            connection.refused = "refused" in message
            try:
                connection.send(message)
                self._watch(number, connection)
            except OSError:
                self._hang_up(number)

    def _watch(self, number: int, connection: Connection) -> None:
        wanted = _READ | (_WRITE if connection.has_unsent else 0)
        if connection.refused and not connection.has_unsent:
            self._hang_up(number)
        elif self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, number)

    def _drop_the_silent(self) -> None:
        now = time.monotonic()
        for number, connection in list(self._connections.items()):
            if connection.silent_until is not None and connection.silent_until < now:
                self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        self._forget(number).socket.close()
        if number == self._lifeline:
            self.stop()

    def _forget(self, number: int) -> Connection:
        connection = self._connections.pop(number)
        self._selector.unregister(connection.socket)
        self._worker.disconnect(number)
        return connection
