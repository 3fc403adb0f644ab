"""Keeps one prediction worker: when it is lost, another is opened, after growing pauses."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from predictor_store.service.link import Link, PredictorError, start_worker
from predictor_store.store.file import StoreError
from sage_sched.config import SageConfig

logger = logging.getLogger(__name__)

# Pauses are of 1, 2, 4 ... seconds up to this. A worker that has lived so long counts as sound.
_MAX_BACKOFF_SECONDS = 60.0


class Supervisor:
    """open_link: opens a worker. Blocks; raises StoreError, PredictorError."""

    def __init__(self, open_link: Callable[[], Link]) -> None:
        self._open_link = open_link
        self._closed = threading.Event()
        self._opened_at = 0.0
        self._num_failures = 0

    def open(self) -> Link:
        """The first worker. Blocks until it is ready. Raises StoreError, PredictorError."""
        link = self._open_link()
        self._opened_at = time.monotonic()
        return link

    def reopen(self, lost: Link) -> Link | None:
        """Opens another worker. Blocks until it is ready; None if close() is called first."""
        lost.kill()
        if time.monotonic() - self._opened_at > _MAX_BACKOFF_SECONDS:
            self._num_failures = 0
        while not self._closed.wait(min(2.0**self._num_failures, _MAX_BACKOFF_SECONDS)):
            self._num_failures = min(self._num_failures + 1, 10)
            try:
                link = self.open()
            except (OSError, StoreError, PredictorError) as error:
                logger.error("the prediction worker does not come back: %s", error)
                continue
            if not self._closed.is_set():
                logger.warning("the prediction worker is back")
                return link
            link.close()
        return None

    def close(self) -> None:
        """From now on no worker is opened."""
        self._closed.set()


class SharedWorker:
    """The worker of a server that has several HTTP processes: they share it over a socket.

    The server's main process starts it, and it ends with that process. config: for the HTTP
    processes; its predictor.service is where the worker listens.
    """

    def __init__(self, config: SageConfig) -> None:
        folder = tempfile.mkdtemp(prefix="sage-sched-")  # mode 0700; the worker removes it
        service = str(Path(folder) / "predictor.socket")
        self.config = replace(config, predictor=replace(config.predictor, service=service))
        self._supervisor = Supervisor(self._start_worker)

    def start(self) -> None:
        """Blocks until the worker is ready. Raises StoreError, PredictorError."""
        link = self._supervisor.open()
        threading.Thread(target=self._keep, args=(link,), daemon=True).start()

    def _start_worker(self) -> Link:
        Path(self.config.predictor.service).parent.mkdir(mode=0o700, exist_ok=True)
        return start_worker(self.config)

    def _keep(self, link: Link | None) -> None:
        while link is not None:
            link.socket.setblocking(True)
            with contextlib.suppress(OSError):
                while link.socket.recv(1 << 16):
                    pass  # what it reports, the HTTP processes are told too
            logger.error("the prediction worker has died, and is started anew")
            link = self._supervisor.reopen(link)
