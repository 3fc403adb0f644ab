"""Connects a server to its prediction worker, and holds the process of a server's own worker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from predictor_store.service import messages
from predictor_store.service.endpoint import PredictorError, connect, token_of
from predictor_store.service.messages import Goodbye, Hello, Refused, Welcome
from predictor_store.service.own_process import START_TIMEOUT_SECONDS, OwnProcess, private_path
from predictor_store.store.file import StoreError
from sage_sched.app.address import Address
from sage_sched.app.config import SageConfig

_CLOSE_TIMEOUT_SECONDS = 10


class Link:
    """A connection to a worker. Threads may share it, taking turns.

    process: the worker's process; None for a service, which was started elsewhere. first: the
        worker's first message, which it sent when it was ready.
    """

    first: Welcome

    def __init__(self, dealer: zmq.Socket[bytes], process: OwnProcess | None = None) -> None:
        self.process = process
        self._dealer = dealer
        self._monitor = dealer.get_monitor_socket()
        self._lock = threading.Lock()

    def say(self, message: messages.ToWorker) -> bool:
        """Send a message. Never blocks. Return False if the worker is gone, or too many messages
        wait for it."""
        data = messages.encode(message)
        with self._lock:
            try:
                self._dealer.send(data, zmq.NOBLOCK)
            except zmq.ZMQError:  # Again, or closed
                return False
        return True

    def heard(self) -> Iterator[messages.ToClient]:
        """Yield the messages that have arrived.

        Call this whenever readable_fd is readable, and after each say(), because ZeroMQ wakes a
        reader once. Raises ValueError if the other side is no worker.
        """
        while True:
            with self._lock:
                try:
                    data = self._dealer.recv(zmq.NOBLOCK)
                except zmq.ZMQError:
                    return
            yield messages.decode_to_client(data)

    def readable_fd(self) -> int:
        """Return a descriptor of the caller's own, which stays valid when the link is closed."""
        with self._lock:
            return -1 if self._dealer.closed else os.dup(self._dealer.fileno())

    def greet(self, model: str, patience_s: float = START_TIMEOUT_SECONDS) -> None:
        """Block until the worker is ready. Raises StoreError, PredictorError."""
        try:
            self.say(Hello(messages.VERSION, messages.valid(model)))
            match self._next(time.monotonic() + patience_s):
                case Welcome(version=messages.VERSION) as welcome:
                    self.first = welcome
                    if welcome.prior is not None:
                        welcome.prior.read()
                case Refused(because="store") as refused:
                    raise StoreError(refused.why)
                case Refused() as refused:
                    raise PredictorError(f"the predictor refuses: {refused.why}")
                case other:
                    raise ValueError(f"it says {other!r:.200}")
        except BaseException as error:
            self.kill()
            self._monitor.close()
            if isinstance(error, ValueError):
                raise PredictorError(f"this is not a predictor service: {error}") from error
            raise

    def _next(self, deadline_s: float) -> messages.ToClient:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left_s * 1e3)))
            if self._dealer in ready:
                for message in self.heard():
                    return message
            if self._monitor in ready:
                raise PredictorError(_why(recv_monitor_message(self._monitor)["event"]))
        raise PredictorError("the prediction worker does not answer")

    def wait(self) -> None:
        """Block until the worker is gone or this link is closed, and disconnect. Only one thread
        may call this."""
        recv_monitor_message(self._monitor)
        self._hang_up()
        self._monitor.close()

    def close(self) -> None:
        """Block until the worker has handled all messages. A server's own worker then ends."""
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_SECONDS
        if self.say(Goodbye()):
            while time.monotonic() < deadline_s and self._dealer.poll(
                _CLOSE_TIMEOUT_SECONDS * 1000
            ):
                if any(isinstance(message, Goodbye) for message in self.heard()):
                    break
        self._hang_up()
        if self.process is not None:
            self.process.close()

    def kill(self) -> None:
        """Disconnect, and end a server's own worker at once."""
        self._hang_up()
        if self.process is not None:
            self.process.kill()

    def _hang_up(self) -> None:
        with self._lock:
            if not self._dealer.closed:
                # Otherwise ZeroMQ's own thread, which closes all sockets, would wait for ever to
                # report to a closed monitor socket.
                self._dealer.disable_monitor()
                self._dealer.close()


def _why(event: int) -> str:
    if event == zmq.EVENT_CLOSED:
        return "no service listens there"
    return "it hangs up: its token differs, or it is no predictor service of this release"


def start_worker(config: SageConfig) -> Link:
    """Start a worker process that ends with this process. Blocks until it is ready. Raises
    StoreError, PredictorError."""
    path = private_path()
    process = OwnProcess(config, path)
    return _greeted(Address(path=path), "", "", process, START_TIMEOUT_SECONDS)


def connect_worker(
    config: SageConfig, model: str, patience_s: float = START_TIMEOUT_SECONDS
) -> Link:
    """Connect to the service that config.predictor names. See start_worker."""
    address = Address.parse(config.predictor.service)
    try:
        token = token_of(config.predictor) if address.is_tcp else ""
        return _greeted(address, token, model, None, patience_s)
    except (OSError, PredictorError) as error:
        raise PredictorError(
            f"no predictor service at {address} ({error}): start one with `sage-sched predictor "
            "serve`, or leave predictor.service out"
        ) from error


def _greeted(
    address: Address, token: str, model: str, process: OwnProcess | None, patience_s: float
) -> Link:
    link = Link(connect(address, token), process)
    link.greet(model, patience_s)
    return link
