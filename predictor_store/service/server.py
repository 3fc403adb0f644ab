"""The loop that serves a worker's clients over sockets: those of one server, or of many."""

from __future__ import annotations

import errno
import itertools
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from predictor_store.service.connection import Connection
from predictor_store.service.http import JsonRequests
from predictor_store.service.lines import MessageLines
from predictor_store.service.sockets import set_up
from predictor_store.service.worker import Outgoing, Worker

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
# While a thread loads a history.
_LOADING_SECONDS = 0.02
# From being accepted to a whole hello, or to the end of a first HTTP request.
_FIRST_SECONDS = 10.0
_MAX_CONNECTIONS = 256
# At a time; then connected clients have their turn.
_MAX_ACCEPTED = 64
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Server:
    """One thread. What a client does to its own connection, no other client notices."""

    def __init__(
        self,
        worker: Worker,
        listener: socket.socket | None = None,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """token: that clients over TCP have to say. clock: for their deadlines."""
        self._worker = worker
        self._token = token
        self._clock = clock
        self._listener = listener
        self._listens = False
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._talks: dict[int, MessageLines | JsonRequests] = {}
        self._numbers = itertools.count()
        self._lifeline: int | None = None
        self._stopped = False
        if listener is not None:
            listener.setblocking(False)
            self._listen(listener)

    def add(self, connected: socket.socket) -> None:
        """A client that is already connected; the server ends when it hangs up."""
        self._lifeline = self._add(connected)
        connection = self._connections[self._lifeline]
        connection.is_known = True
        connection.allow(None)

    def stop(self) -> None:
        """From a signal's handler, say: run() returns within a second."""
        self._stopped = True

    def run(self) -> None:
        """Until stop(), or until the client of add() hangs up."""
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
                self._drop_the_late()
                if self._listener is not None:
                    self._listen(self._listener)

    def close(self) -> None:
        """Hang up on all."""
        for number in list(self._connections):
            self._hang_up(number)
        self._selector.close()

    def _listen(self, listener: socket.socket) -> None:
        if not self._listens:
            self._selector.register(listener, _READ)
            self._listens = True

    def _take_in(self, wait_s: float) -> None:
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept(self._listener)
            elif key.data in self._connections:
                self._serve(key.data, events)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connected, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it is gone again; or we have no room, until the next report
                logger.warning("a client could not be taken in: %s", error)
                if error.errno in _NO_ROOM:
                    self._selector.unregister(listener)
                    self._listens = False
                return
            if len(self._connections) >= _MAX_CONNECTIONS:
                self._make_room()
            if len(self._connections) >= _MAX_CONNECTIONS:
                connected.close()
            else:
                self._add(connected)

    def _make_room(self) -> None:
        """Hangs up on the oldest client that has not said the token: any number of strangers cannot
        keep others out."""
        unknown = (number for number, each in self._connections.items() if not each.is_known)
        if (number := next(unknown, None)) is not None:
            self._hang_up(number)

    def _add(self, connected: socket.socket) -> int:
        number = next(self._numbers)
        set_up(connected)
        connection = self._connections[number] = Connection(connected, self._clock)
        connection.allow(_FIRST_SECONDS)
        self._selector.register(connected, _READ, number)
        return number

    def _serve(self, number: int, events: int) -> None:
        connection = self._connections[number]
        with self._at_risk_of(number):
            if events & _WRITE:
                connection.flush()
            if events & _READ and (piece := connection.receive()):
                if number not in self._talks:
                    is_tcp = connection.socket.family != socket.AF_UNIX
                    kind = MessageLines if piece.startswith(b"{") else JsonRequests
                    token = self._token if is_tcp else ""
                    self._talks[number] = kind(number, connection, self._worker, token)
                self._talks[number].hear(piece)

    def _send(self, messages: Iterable[Outgoing]) -> None:
        for number, message in messages:
            if (talk := self._talks.get(number)) is not None:
                with self._at_risk_of(number):
                    talk.told(message)

    def _drop_the_late(self) -> None:
        for number, connection in list(self._connections.items()):
            if connection.is_late:
                with self._at_risk_of(number):
                    if (talk := self._talks.get(number)) is not None and not connection.is_ending:
                        talk.time_is_up()
                self._hang_up(number)

    @contextmanager
    def _at_risk_of(self, number: int) -> Iterator[None]:
        """An error ends only this connection. Afterwards the loop waits for what the client sends,
        and until it can take in what is unsent."""
        try:
            yield
        except (OSError, ValueError):
            self._hang_up(number)
        except Exception:
            logger.exception("a client is hung up on")
            self._hang_up(number)
        if (connection := self._connections.get(number)) is not None:
            wanted = _READ | (_WRITE if connection.has_unsent else 0)
            if self._selector.get_key(connection.socket).events != wanted:
                self._selector.modify(connection.socket, wanted, number)

    def _hang_up(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        self._talks.pop(number, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._worker.disconnect(number)
        if number == self._lifeline:
            self.stop()
