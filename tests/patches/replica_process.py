"""A process that is watched as a scheduler's, and imports little, so that it is soon there."""

from __future__ import annotations

from typing import Any

import setproctitle
import zmq


def replica(title: str, end: str, ready: Any) -> None:
    setproctitle.setproctitle(title)
    socket = zmq.Context().socket(zmq.PULL)
    socket.connect(end)
    ready.set()
    while True:
        socket.recv()
