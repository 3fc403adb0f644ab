"""One client of a service that speaks predictor_store.service.protocol: a server."""

from __future__ import annotations

import hmac
from typing import Any

from predictor_store.service import protocol
from predictor_store.service.connection import Connection
from predictor_store.service.worker import Worker


class MessageLines:
    """The client has the same number for the worker. token: that it has to say first; "": none."""

    def __init__(self, number: int, connection: Connection, worker: Worker, token: str) -> None:
        self._number = number
        self._connection = connection
        self._worker = worker
        self._token = token
        self._lines = protocol.LineReader()
        self._has_greeted = False

    def hear(self, piece: bytes) -> None:
        """What it says. Raises OSError if it is gone, ValueError if it says what has no end."""
        for message in self._lines.feed(piece):
            if not self._has_greeted:
                self._has_greeted = True
                self._greet(message)
            elif not self._connection.is_ending:
                self._worker.receive(self._number, message)

    def told(self, message: dict[str, Any]) -> None:
        """What the worker tells it. Raises OSError if it is gone, or hung."""
        if self._connection.is_ending:
            return
        self._connection.send(protocol.encode(message))
        if "refused" in message:
            self._connection.end()

    def time_is_up(self) -> None:
        """Its hello has not come: there is nothing to say."""

    def _greet(self, message: dict[str, Any] | None) -> None:
        match message:
            case {"hello": protocol.VERSION, "model": str(model), **rest}:
                if self._token and not is_same(rest.get("token"), self._token):
                    self.told(protocol.refusal("the token is not the service's", "token"))
                    return
                self._connection.is_known = True
                self._connection.allow(None)
                self._worker.connect(self._number, model)
            case {"hello": version} if version != protocol.VERSION:
                why = (
                    f"it speaks version {version!r:.40} of the protocol, this worker "
                    f"{protocol.VERSION}: both need the same release of sage-sched"
                )
                self.told(protocol.refusal(why, "version"))
            case _:
                self.told(protocol.refusal("its first message is no hello", "version"))


def is_same(said: object, token: str) -> bool:
    """Whether it is the token, in a time that says nothing of how much of it was right."""
    if not isinstance(said, str):
        return False
    return hmac.compare_digest(said.encode("utf-8", "replace"), token.encode("utf-8", "replace"))
