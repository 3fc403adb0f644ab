"""Runs the event loop that serves a worker's clients over ZeroMQ: one inference server, or many."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import zmq

from predictor_store.service import endpoint, messages
from predictor_store.service.messages import Goodbye, Hello, Refused
from predictor_store.service.worker import Outgoing, Worker

_REPORT_SECONDS = 1.0
# At most this many messages are received before a batch of prompts is embedded.
_MOST_TAKEN = 1_000
# At most this many batches are embedded after the server has been stopped.
_MOST_LAST = 100


class Server:
    """Serves a worker's clients in one thread, and closes the router at the end."""

    def __init__(
        self,
        worker: Worker,
        router: zmq.Socket[bytes],
        parent: int | None = None,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Make a server.

        parent: the id of a process; when that ends, this server stops. beside: a function whose
            coroutine runs in the same loop, until it is cancelled.
        """
        self._worker = worker
        self._router = router
        self._parent = parent
        self._beside = beside
        self._stopped = False
        self._hurries = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set whenever there is work.
        self._is_needed = asyncio.Event()
        worker.wake = self._wake

    def stop(self) -> None:
        """Make run() return. May be called in a signal handler, or another thread."""
        self._stopped = True
        self._wake()

    def hurry(self) -> None:
        """Write messages at once from now on. May be called where stop() may."""
        self._hurries = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._is_needed.set)

    def run(self) -> None:
        """Serve until stop(), or until the parent has ended. Afterwards the router is closed."""
        # Use asyncio's own loop: uvloop, which the process may prefer, has another clock.
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._run())
        finally:
            endpoint.close(self._router)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._router.fileno(), self._is_needed.set)
        tasks = set[asyncio.Task[None]]()  # the loop alone does not keep references to them
        if self._beside is not None:
            tasks.add(self._loop.create_task(self._beside()))
        next_report = time.monotonic() + _REPORT_SECONDS
        while not self._stopped:
            await self._wait_for_work(next_report - time.monotonic())
            self._is_needed.clear()
            self._take_in()
            self._tell(self._worker.step())
            if self._hurries or time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_SECONDS
                self._tell(self._worker.report())
                self._stopped |= self._parent not in (None, os.getppid())
        for _ in range(_MOST_LAST):
            if not self._take_in() and not self._worker.busy:
                break
            self._worker.step()

    async def _wait_for_work(self, wait_s: float) -> None:
        """Wait for at most wait_s. Other tasks get a turn in any case."""
        await asyncio.sleep(0)
        # ZeroMQ wakes a reader once, and not again for messages that came during a send.
        if not self._worker.busy and not self._router.poll(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_needed.wait()

    def _take_in(self) -> int:
        """Take in waiting messages, and return their number."""
        for taken in range(_MOST_TAKEN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            try:
                self._hear(frames[0], messages.decode_to_worker(b"".join(frames[1:])))
            except (ValueError, RecursionError):
                self._worker.count_malformed(frames[0])
        return _MOST_TAKEN

    def _hear(self, client: bytes, message: messages.ToWorker) -> None:
        match message:
            case Hello(messages.VERSION, model):
                self._worker.connect(client, model)
            case Hello(version):
                why = (
                    f"it speaks version {version} of the protocol, this worker "
                    f"{messages.VERSION}: both need the same release of sage-sched"
                )
                self._tell([(client, Refused(messages.VERSION, why, "version"))])
            case Goodbye():
                self._tell(self._worker.report())
                self._worker.disconnect(client)
                self._tell([(client, message)])
            case _:
                self._worker.receive(client, message)

    def _tell(self, outgoing: Iterable[Outgoing]) -> None:
        for client, message in outgoing:
            if not isinstance(client, bytes):
                client.tell(message)
                continue
            try:
                self._router.send_multipart([client, messages.encode(message)], zmq.NOBLOCK)
            except zmq.Again:
                pass  # the client reads nothing, and no longer waits for answers
            except zmq.ZMQError:
                self._worker.disconnect(client)  # the client is gone
