"""A server's connection to its prediction worker, and the worker's process if it is its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from predictor_store.service import protocol, sockets
from predictor_store.service.sockets import PredictorError as PredictorError
from predictor_store.store.file import StoreError
from sage_sched.address import Address
from sage_sched.config import SageConfig

# Loading takes seconds, and minutes on a host that is busy with other things.
START_TIMEOUT_SECONDS = 600.0
_CLOSE_TIMEOUT_SECONDS = 10.0
_MAX_RECEIVE_BYTES = 1 << 16
# For the worker: 10,000 prompts of usual length. It answers what it cannot keep.
_MAX_UNSENT_BYTES = 8 << 20
WORKER_MODULE = "predictor_store.service.worker_process"
# It must not take cores from the engine, nor look for a network.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Link:
    """process: None for a service, which others have started. messages: of the worker; the next one
    blocks until it comes, they end when the worker hangs up, and raise OSError if it is gone,
    ValueError if it is no worker. first: the one that says it is ready. patience_s: until then."""

    def __init__(
        self,
        connected: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
        patience_s: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self.socket = connected
        self.process = process
        self._patience_s = patience_s
        self.messages = self._heard()
        self.first: dict[str, Any] = {}
        # What the socket had no room for, which a thread sends.
        self._unsent = bytearray()
        self._is_sending = False
        self._lock = threading.Lock()

    def _heard(self) -> Iterator[dict[str, Any]]:
        deadline_s = time.monotonic() + self._patience_s
        lines = protocol.LineReader()
        while piece := self.socket.recv(_MAX_RECEIVE_BYTES):
            yield from filter(None, lines.feed(piece))
            if not self.first:
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise TimeoutError
                self.socket.settimeout(left_s)

    def say(self, message: dict[str, Any]) -> bool:
        """Never blocks. Sends the whole message, if need be later. False if too much waits for the
        worker; then nothing is sent. Raises OSError if it is gone."""
        data = protocol.encode(message)
        with self._lock:
            if not self._is_sending:
                with contextlib.suppress(BlockingIOError):
                    data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]
            if len(self._unsent) + len(data) > _MAX_UNSENT_BYTES:
                return False
            self._unsent += data
            if self._unsent and not self._is_sending:
                self._is_sending = True
                threading.Thread(target=self._send_rest, daemon=True).start()
        return True

    def _send_rest(self) -> None:
        with contextlib.suppress(OSError):  # whoever reads `messages` learns of it
            while True:
                with self._lock:
                    data, self._unsent = self._unsent, bytearray()
                    self._is_sending = bool(data)
                if not data:
                    return
                self.socket.sendall(data)

    def greet(self, model: str = "", token: str = "") -> None:
        """Blocks until the worker is ready. Raises StoreError, PredictorError.

        A worker that does not know the token is told neither it nor the model.
        """
        ours = protocol.nonce()
        try:
            self.socket.settimeout(self._patience_s)
            match self._answer(protocol.hello(ours)):
                case {"nonce": str(theirs), "proof": proof}:
                    if not protocol.is_same(proof, protocol.proof(token, "service", ours, theirs)):
                        raise PredictorError("this server's token is not the service's")
                case other:
                    raise ValueError(f"it says {other!r:.200}")
            proof = protocol.proof(token, "client", ours, theirs)
            first = self._answer({"model": model, "proof": proof})
            protocol.Stats.decode(first.get("ready"))
            protocol.decode_distribution(first.get("prior"))
            self.first = first
            self.socket.settimeout(None)
        except BaseException as error:
            self.kill()
            if isinstance(error, TimeoutError):
                why = f"the prediction worker was not ready after {self._patience_s:.0f} s"
            elif isinstance(error, OSError):
                why = "the prediction worker ended while it started; its own output says why"
            elif isinstance(error, ValueError):
                why = f"this is no predictor service: {error}"
            else:
                raise
            raise PredictorError(why) from error

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Raises StoreError and PredictorError if it refuses, or is of another version."""
        self.socket.sendall(protocol.encode(message))
        match next(self.messages, None):
            case None:
                raise ConnectionResetError
            case {"refused": why, "because": "store"}:
                raise StoreError(why)
            case {"refused": why}:
                raise PredictorError(f"the predictor refuses: {why}")
            case {"version": protocol.VERSION} as answer:
                return answer
            case {"version": version}:
                raise PredictorError(
                    f"the predictor speaks version {version!r:.40} of the protocol, this server "
                    f"{protocol.VERSION}: both need the same release of sage-sched"
                )
            case other:
                raise ValueError(f"it says {other!r:.200}")

    def close(self) -> None:
        """Hangs up. A server's own worker then writes what it has and ends; blocks until it has."""
        self._hang_up()
        if self.process is None:
            return
        try:
            self.process.wait(_CLOSE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Hangs up, and ends a server's own worker at once."""
        self._hang_up()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _hang_up(self) -> None:
        # Closing alone would leave a thread that reads waiting.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def start_worker(config: SageConfig) -> Link:
    """Starts a process that ends with this one. Blocks until it is ready. Raises StoreError,
    PredictorError."""
    sections = {
        "store": dataclasses.asdict(config.store),
        "predictor": dataclasses.asdict(config.predictor),
    }
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: modules are not looked for in the directory that the server was started in, which may
        # have a queue.py, say.
        # The folder of this package is added: it may be on no path.
        folders = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
        path = os.pathsep.join(filter(None, folders))
        command = [sys.executable, "-P", "-m", WORKER_MODULE, str(theirs.fileno())]
        process = subprocess.Popen(
            [*command, json.dumps(sections)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
        )
    link = Link(ours, process)
    link.greet()
    return link


def connect_worker(
    config: SageConfig, model: str, patience_s: float = START_TIMEOUT_SECONDS
) -> Link:
    """Connects to the service that config.predictor names. See start_worker."""
    address = Address.parse(config.predictor.service)
    try:
        token = sockets.token_of(config.predictor) if address.is_tcp else ""
        link = Link(sockets.connect(address), patience_s=patience_s)
    except (OSError, PredictorError) as error:
        raise PredictorError(
            f"no predictor service at {address} ({error}): start one with `sage-sched predictor "
            "serve`, or leave predictor.service out"
        ) from error
    link.greet(model, token)
    return link
