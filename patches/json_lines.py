"""Writes a file of JSON lines for a server: the trace, or the record of shadow mode."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from predictor_store.cached_file import own_file

logger = logging.getLogger(__name__)

# The maximum number of lines that wait for the disk. Further lines are dropped.
_MOST_WAITING = 100_000
_WRITES_EVERY_S = 0.2


class JsonLines:
    """Appends lines to a file that only its owner can read. It follows no links.

    A thread of its own writes, so requests never wait for the disk. Lines that overflow its queue
    are dropped and counted. A write error ends the file with one log line; nothing is raised.
    """

    def __init__(self, path: Path, max_bytes: float = float("inf")) -> None:
        """max_bytes: the maximum size of the file. A full file is renamed FILE.1 and replaces the
        previous one."""
        self._path, self._max_bytes = path, max_bytes
        self._lines: deque[bytes] = deque()
        self._num_lost = self._num_written = 0
        self._is_stopped = False
        threading.Thread(target=self._write_forever, daemon=True).start()

    def add(self, line: dict[str, Any]) -> None:
        """Queue a line for writing."""
        if self._is_stopped or len(self._lines) >= _MOST_WAITING:
            self._num_lost += 1
        else:
            self._lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _write_forever(self) -> None:
        try:
            file = self._opened()
            while True:
                while self._lines:
                    if file.tell() + len(self._lines[0]) > self._max_bytes:
                        file.close()
                        self._path.replace(f"{self._path}.1")
                        file = self._opened()
                    file.write(self._lines[0])
                    self._lines.popleft()
                    self._num_written += 1
                time.sleep(_WRITES_EVERY_S)
        except OSError as error:
            self._is_stopped = True
            self._num_lost += len(self._lines)
            self._lines.clear()
            logger.error("nothing more is written to %s: %s", self._path, error)

    def _opened(self) -> IO[bytes]:
        file = open(self._path, "ab", buffering=0, opener=own_file)  # noqa: SIM115
        os.fchmod(file.fileno(), 0o600)  # for an existing file; fails if another user owns it
        return file

    def stats(self) -> dict[str, Any]:
        """Return counters for /server_info."""
        return {
            "num_written": self._num_written,
            "num_lost": self._num_lost,
            "is_stopped": self._is_stopped,
        }
