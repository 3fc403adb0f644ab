"""A file of JSON lines beside a server: the trace, and the record of shadow mode."""

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

# The most lines that wait for the disk.
_MOST_WAITING = 100_000
_WRITES_EVERY_S = 0.2


class JsonLines:
    """Appends lines to a file that only its owner can read. No link is followed.

    A thread of its own writes, so nobody waits for a disk. Lines that it cannot take are dropped
    and counted. An error ends the file with one log line, and raises nothing.
    """

    def __init__(self, path: Path, max_bytes: float = float("inf")) -> None:
        """max_bytes: the largest size of the file, and of the previous one, FILE.1."""
        self._path, self._max_bytes = path, max_bytes
        self._lines: deque[bytes] = deque()
        self._num_lost = self._num_written = 0
        self._is_stopped = False
        threading.Thread(target=self._write_forever, daemon=True).start()

    def add(self, line: dict[str, Any]) -> None:
        """Write a line, soon."""
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
        os.fchmod(file.fileno(), 0o600)  # an existing file too; it fails for others' files
        return file

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info."""
        return {
            "num_written": self._num_written,
            "num_lost": self._num_lost,
            "is_stopped": self._is_stopped,
        }
