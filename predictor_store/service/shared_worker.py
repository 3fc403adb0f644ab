"""The worker of a server that has several HTTP processes: they share it over a socket."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from predictor_store.service.link import Link, PredictorError, start_worker
from predictor_store.store.store_file import StoreError
from sage_sched.config import SageConfig

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 60.0
_MAX_RECEIVE_BYTES = 1 << 16


class SharedWorker:
    """Started by the server's main process, ends with it, and is started anew if it dies.

    config: for the HTTP processes, with predictor.service where the worker listens.
    """

    def __init__(self, config: SageConfig) -> None:
        folder = tempfile.mkdtemp(prefix="sage-sched-")  # mode 0700; the worker removes it
        service = str(Path(folder) / "predictor.socket")
        self.config = replace(config, predictor=replace(config.predictor, service=service))

    def start(self) -> None:
        """Blocks until it is ready. Raises StoreError, PredictorError."""
        link = start_worker(self.config)
        threading.Thread(target=self._keep, args=(link,), daemon=True).start()

    def _keep(self, link: Link) -> None:
        pause_s = 1.0
        while True:
            started = time.monotonic()
            self._wait_for_the_end(link)
            logger.error("the prediction worker has died, and is started anew")
            pause_s = 1.0 if time.monotonic() - started > _MAX_BACKOFF_SECONDS else pause_s
            while True:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_BACKOFF_SECONDS)
                try:
                    Path(self.config.predictor.service).parent.mkdir(mode=0o700, exist_ok=True)
                    link = start_worker(self.config)
                    break
                except (OSError, StoreError, PredictorError) as error:
                    logger.error("the prediction worker does not come back: %s", error)

    def _wait_for_the_end(self, link: Link) -> None:
        link.socket.setblocking(True)
        try:
            # What it reports is for the HTTP processes, which are told too.
            while link.socket.recv(_MAX_RECEIVE_BYTES):
                pass
        except OSError:
            pass
        link.kill()
