"""A running prediction worker and the socket to it."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from predictor_store import protocol
from predictor_store.store_file import StoreError
from sage_sched.config import SageConfig

# Loading takes seconds; on a host that is busy with other things, minutes.
_START_TIMEOUT_SECONDS = 600.0
_CLOSE_TIMEOUT_SECONDS = 10.0
WORKER_MODULE = "predictor_store.worker"
# It must not take cores from the engine, nor look for a network.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# About 40 predictions: what the event loop takes in at a time.
_MAX_RECEIVE_BYTES = 64 * 1024


class PredictorError(Exception):
    """The prediction worker did not come up; the message says why."""


@dataclass(slots=True)
class Link:
    """One worker's process, and messages to and from it. Nothing here blocks but close and kill.

    first: its first message.
    """

    process: subprocess.Popen[bytes]
    socket: socket.socket
    lines: protocol.LineReader = field(default_factory=protocol.LineReader)
    first: dict[str, Any] = field(default_factory=dict)
    # The rest of a message of which the socket's buffer took only the beginning.
    unsent: bytes = b""

    def send(self, message: dict[str, Any]) -> bool:
        """False where the worker is so far behind that the buffer is full: then it is not sent.

        Raises OSError where the worker is dead.
        """
        if not self.flush():
            return False
        line = protocol.encode(message)
        num_taken = self._offer(line)
        if 0 < num_taken < len(line):
            self.unsent = line[num_taken:]
        return num_taken > 0

    def flush(self) -> bool:
        """Whether nothing is left unsent. Raises OSError where the worker is dead."""
        if self.unsent:
            self.unsent = self.unsent[self._offer(self.unsent) :]
        return not self.unsent

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that are there. Raises OSError where the worker is dead."""
        try:
            piece = self.socket.recv(_MAX_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not piece:
            raise ConnectionResetError("the prediction worker has hung up")
        yield from filter(None, self.lines.feed(piece))

    def close(self) -> None:
        """Hang up: the worker writes what it has and ends."""
        self.socket.close()
        try:
            self.process.wait(_CLOSE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def _offer(self, data: bytes) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0


def start_worker(config: SageConfig) -> Link:
    """Blocks for the seconds that loading takes. Raises StoreError, PredictorError."""
    sections = {
        "store": dataclasses.asdict(config.store),
        "predictor": dataclasses.asdict(config.predictor),
    }
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: the directory that the server was started in is not looked into for modules. It
        # may have a queue.py, say.
        command = [sys.executable, "-P", "-m", WORKER_MODULE]
        link = Link(
            subprocess.Popen(
                [*command, str(theirs.fileno()), json.dumps(sections)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
            ),
            ours,
        )
    try:
        link.first = _first_message(link)
    except BaseException:
        link.kill()
        raise
    return link


def _first_message(link: Link) -> dict[str, Any]:
    link.socket.settimeout(_START_TIMEOUT_SECONDS)
    messages: list[dict[str, Any]] = []
    try:
        while not messages:
            messages = list(link.receive())
    except TimeoutError as error:
        raise PredictorError(
            f"the prediction worker was not ready after {_START_TIMEOUT_SECONDS:.0f} s"
        ) from error
    except ConnectionResetError as error:
        raise PredictorError(
            "the prediction worker ended while it started; its own output says why"
        ) from error
    if "refused" in messages[0]:
        raise StoreError(messages[0]["refused"])
    link.socket.setblocking(False)
    return messages[0]
