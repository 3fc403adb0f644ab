"""Keeps one prediction worker running: if it is lost, opens another one after growing pauses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from predictor_store.service.own_process import OwnProcess, private_path
from sage_sched.app.config import SageConfig

logger = logging.getLogger(__name__)

# Pauses are 1, 2, 4 ... seconds, up to this maximum. After a worker that has lived this long, they
# begin at 1 again.
_MAX_BACKOFF_SECONDS = 60.0


class Watched(Protocol):
    """A worker's process, or a link to it.

    wait blocks until the worker is lost. close blocks until it has written its records. kill ends
    it at once.
    """

    def wait(self) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


_Worker = TypeVar("_Worker", bound=Watched)


class Supervisor(Generic[_Worker]):
    """Waits in a thread of its own until the worker is lost, and opens the next one there.

    open_worker: blocks; raises StoreError, PredictorError.
    attach: called with each worker. lose: called when it is lost.
    """

    def __init__(
        self,
        open_worker: Callable[[], _Worker],
        attach: Callable[[_Worker], None] = lambda worker: None,
        lose: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_worker = open_worker
        self._attach = attach
        self._lose = lose
        self._closed = threading.Event()
        self._worker: _Worker | None = None
        self._opened_at = 0.0
        self._num_failures = 0
        # The logged reason why there is no worker; "" if there is one.
        self._last_warning = ""

    def start(self) -> None:
        """Block until a worker is ready. Raises StoreError, PredictorError."""
        threading.Thread(target=self._keep, args=(self._open(),), daemon=True).start()

    def seek(self, patience_s: float) -> None:
        """Do the same as start(), but raise nothing, and block for at most patience_s. A thread
        then keeps trying until there is a worker."""
        is_settled = threading.Event()

        def keep() -> None:
            worker = self._tried()
            is_settled.set()
            self._keep(worker)

        threading.Thread(target=keep, daemon=True).start()
        if not is_settled.wait(patience_s):
            self._report(f"no answer within {patience_s:.0f} s")

    def close(self) -> None:
        """Block until the worker has written its records. From now on no worker is opened."""
        self._closed.set()
        if self._worker is not None:
            self._worker.close()

    def _open(self) -> _Worker:
        self._worker = worker = self._open_worker()
        self._opened_at = time.monotonic()
        if self._closed.is_set():
            worker.close()
        else:
            self._attach(worker)
        return worker

    def _keep(self, worker: _Worker | None) -> None:
        while worker := worker or self._reopened():
            worker.wait()
            self._lose()
            if not self._closed.is_set():
                self._report("it has ended")
                worker.kill()
            worker = None

    def _reopened(self) -> _Worker | None:
        """Return another worker. Blocks until it is ready; None if close() is called first."""
        if time.monotonic() - self._opened_at > _MAX_BACKOFF_SECONDS:
            self._num_failures = 0
        while not self._closed.wait(min(2.0**self._num_failures, _MAX_BACKOFF_SECONDS)):
            self._num_failures = min(self._num_failures + 1, 10)
            if (worker := self._tried()) is not None:
                return worker
        return None

    def _tried(self) -> _Worker | None:
        try:
            worker = self._open()
        except Exception as error:
            self._report(str(error))
            return None
        if self._last_warning:
            self._last_warning = ""
            logger.warning("the prediction worker is ready")
        return worker

    def _report(self, why: str) -> None:
        if why != self._last_warning:
            self._last_warning = why
            logger.error(
                "no prediction worker (%s): requests get the prior until there is one", why
            )


class SharedWorker:
    """The worker that the several HTTP processes of a server share.

    The server's main process starts it, and it ends with that process. config: for the HTTP
    processes; its predictor.service is the worker's address.
    """

    def __init__(self, config: SageConfig) -> None:
        service = private_path()
        self.config = replace(config, predictor=replace(config.predictor, service=service))
        self._supervisor = Supervisor(lambda: OwnProcess(config, service))

    def start(self) -> None:
        """Block until a worker is ready, as Supervisor.start() does."""
        self._supervisor.start()

    def close(self) -> None:
        self._supervisor.close()
