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
from typing import Any

from predictor_store.service import sockets
from predictor_store.service.link import Link, PredictorError, start_worker
from sage_sched.config import SageConfig

logger = logging.getLogger(__name__)

# Pauses are of 1, 2, 4 ... seconds up to this. A worker that has lived so long counts as sound.
_MAX_BACKOFF_SECONDS = 60.0
_FOLDER_PREFIX, _SOCKET_NAME = "sage-sched-", "predictor.socket"
_LEAST_AGE_S = 60.0


class Supervisor:
    """Reads from the worker in a thread of its own, which opens the next one, too.

    open_link: opens a worker. Blocks; raises StoreError, PredictorError. attach: told of each
    worker. hear: told what it says. lose: called when it is lost.
    """

    def __init__(
        self,
        open_link: Callable[[], Link],
        attach: Callable[[Link], None] = lambda link: None,
        hear: Callable[[dict[str, Any]], None] = lambda message: None,
        lose: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_link = open_link
        self._attach = attach
        self._hear = hear
        self._lose = lose
        self._closed = threading.Event()
        self._link: Link | None = None
        self._opened_at = 0.0
        self._num_failures = 0
        # Why there is no worker, as was logged; "" if there is one.
        self._told = ""

    def start(self) -> None:
        """Blocks until a worker is ready. Raises StoreError, PredictorError."""
        threading.Thread(target=self._keep, args=(self._open(),), daemon=True).start()

    def seek(self, patience_s: float) -> None:
        """As start, but raises nothing, and blocks for patience_s at most. The worker is sought on
        in a thread until there is one."""
        is_settled = threading.Event()

        def keep() -> None:
            link = self._tried()
            is_settled.set()
            self._keep(link)

        threading.Thread(target=keep, daemon=True).start()
        if not is_settled.wait(patience_s):
            self._tell(f"it has not answered in {patience_s:.0f} s")

    def close(self) -> None:
        """Blocks until the worker has written what it has. From now on no worker is opened."""
        self._closed.set()
        if self._link is not None:
            self._link.close()

    def _open(self) -> Link:
        self._link = link = self._open_link()
        self._opened_at = time.monotonic()
        if self._closed.is_set():
            link.close()
        else:
            self._attach(link)
        return link

    def _keep(self, link: Link | None) -> None:
        while link := link or self._reopened():
            why = "it has ended"
            try:
                for message in link.messages:
                    self._hear(message)
            except Exception as error:  # whatever it says, the next one is to be opened
                why = repr(error)
            self._lose()
            if not self._closed.is_set():
                self._tell(why)
                link.kill()
            link = None

    def _reopened(self) -> Link | None:
        """Another worker. Blocks until it is ready; None if close() is called first."""
        if time.monotonic() - self._opened_at > _MAX_BACKOFF_SECONDS:
            self._num_failures = 0
        while not self._closed.wait(min(2.0**self._num_failures, _MAX_BACKOFF_SECONDS)):
            self._num_failures = min(self._num_failures + 1, 10)
            if (link := self._tried()) is not None:
                return link
        return None

    def _tried(self) -> Link | None:
        try:
            link = self._open()
        except Exception as error:
            self._tell(str(error))
            return None
        if self._told:
            self._told = ""
            logger.warning("the prediction worker is there")
        return link

    def _tell(self, why: str) -> None:
        if why != self._told:
            self._told = why
            logger.error(
                "no prediction worker (%s): requests get the prior until there is one", why
            )


def _remove_left() -> None:
    """Folders of this user's servers that were killed together with their workers."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/{_SOCKET_NAME}"):
        with contextlib.suppress(OSError, PredictorError):
            # One that is new may be about to listen.
            if time.time() - left.lstat().st_mtime > _LEAST_AGE_S:
                sockets.remove_dead(left)
                left.parent.rmdir()


class SharedWorker(Supervisor):
    """The worker of a server that has several HTTP processes: they share it over a socket.

    The server's main process starts it, and it ends with that process. config: for the HTTP
    processes; its predictor.service is where the worker listens.
    """

    def __init__(self, config: SageConfig) -> None:
        _remove_left()
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)  # mode 0700; the worker removes it
        service = str(Path(folder) / _SOCKET_NAME)
        self.config = replace(config, predictor=replace(config.predictor, service=service))
        super().__init__(self._start_worker)

    def _start_worker(self) -> Link:
        Path(self.config.predictor.service).parent.mkdir(mode=0o700, exist_ok=True)
        return start_worker(self.config)
