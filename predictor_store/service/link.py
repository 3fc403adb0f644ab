"""The socket to a prediction worker, and its process where it is the server's own."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictor_store.service import protocol, service_socket
from predictor_store.service.service_socket import ServiceError
from predictor_store.store.store_file import StoreError
from sage_sched.address import Address
from sage_sched.config import SageConfig

# Loading takes seconds; on a host that is busy with other things, minutes.
_START_TIMEOUT_SECONDS = 600.0
_CLOSE_TIMEOUT_SECONDS = 10.0
WORKER_MODULE = "predictor_store.service.worker_process"
# It must not take cores from the engine, nor look for a network.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# About 40 predictions: what the event loop takes in at a time.
_MAX_RECEIVE_BYTES = 64 * 1024


class PredictorError(Exception):
    """The prediction worker did not come up, or will not serve; the message says why."""


@dataclass(slots=True)
class Link:
    """Messages to and from one worker. Nothing here blocks but close and kill.

    process: None of a service, which others started. first: its first message.
    """

    process: subprocess.Popen[bytes] | None
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
        """Hang up: the server's own worker writes what it has and ends."""
        self.socket.close()
        if self.process is None:
            return
        try:
            self.process.wait(_CLOSE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.socket.close()
        if self.process is not None:
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
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": _own_path()},
            ),
            ours,
        )
    _greet(link, protocol.hello(""))
    return link


def _own_path() -> str:
    """PYTHONPATH with the folder that this package is in, which may be on nobody's path."""
    folder = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))


def connect_worker(config: SageConfig, model: str) -> Link:
    """To the service that config.predictor names. Blocks until it has read what it knows of the
    model. Raises StoreError, PredictorError."""
    address = Address.parse(config.predictor.service)
    try:
        token = service_socket.token_of(config.predictor) if address.is_tcp else ""
        link = Link(None, service_socket.connect(address))
    except (OSError, ServiceError) as error:
        raise PredictorError(
            f"no predictor service at {address} ({error}): start one with `sage-sched predictor "
            "serve`, or leave predictor.service out"
        ) from error
    _greet(link, protocol.hello(model, token))
    return link


def _greet(link: Link, hello: dict[str, Any]) -> None:
    try:
        link.first = _first_message(link, hello)
    except BaseException:
        link.kill()
        raise


def _first_message(link: Link, hello: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    messages: list[dict[str, Any]] = []
    try:
        link.socket.settimeout(_START_TIMEOUT_SECONDS)
        link.socket.sendall(protocol.encode(hello))
        while not messages:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            link.socket.settimeout(left_s)
            messages = list(link.receive())
    except TimeoutError as error:
        raise PredictorError(
            f"the prediction worker was not ready after {_START_TIMEOUT_SECONDS:.0f} s"
        ) from error
    except OSError as error:
        raise PredictorError(
            "the prediction worker ended while it started; its own output says why"
        ) from error
    except ValueError as error:
        raise PredictorError(f"this is no predictor service: {error}") from error
    first = messages[0]
    if "refused" in first:
        refusal = f"the predictor refuses: {first['refused']}"
        raise StoreError(first["refused"]) if _is_of_store(first) else PredictorError(refusal)
    if first.get("version") != protocol.VERSION:
        raise PredictorError(
            f"the predictor speaks version {first.get('version')} of the protocol, this server "
            f"{protocol.VERSION}: both need the same release of sage-sched"
        )
    match first:
        case {"ready": {"process": _}, "prior": dict() | None}:
            link.socket.setblocking(False)
            return first
    raise PredictorError(f"this is no predictor service: it says {first!r:.200}")


def _is_of_store(refusal: dict[str, Any]) -> bool:
    return refusal.get("because") == "store"
