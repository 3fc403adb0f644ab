"""What a server in shadow mode predicted, and what came: JSON lines, for `sage-sched whatif`.

A line a request: arrival_s (seconds since 1970), input_tokens, output_tokens, max_new_tokens (0: it
named none), is_cut (its cap or its client ended the answer), ttlt_s, and prediction, the
distribution as LengthDistribution.as_fields has it, null if none had come by then. No prompts.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from sage_sched.distribution import LengthDistribution

logger = logging.getLogger(__name__)


def refuse_place(file: str) -> None:
    """Raises OSError if no record can be written there. Makes none."""
    path = Path(file).expanduser()
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(f"--sage-shadow is {file}, and {path.parent} is no folder to write to")
    if path.is_symlink() or (path.exists() and not (path.is_file() and os.access(path, os.W_OK))):
        raise OSError(f"--sage-shadow is {file}, which is no file of this user's own")


class ShadowRecord:
    """Readable by its owner only; what is there is gone on with. If the disk takes no more it ends,
    with one log line."""

    def __init__(self, file: str) -> None:
        """Raises OSError unless it is a file of this user's own, and no link to one."""
        path = Path(file).expanduser()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o600)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            self.close()
            raise OSError(f"{path} is no file of this user's own")
        os.fchmod(self._fd, 0o600)
        self._path = path
        self._num_written = 0
        self._num_lost = 0

    def add(
        self,
        *,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        cap_tokens: int,
        is_cut: bool,
        ttlt_s: float,
        prediction: LengthDistribution | None,
    ) -> None:
        """Never raises OSError."""
        said = None if prediction is None else prediction.as_fields()
        if said is not None:
            said["weights"] = [float(f"{weight:.8g}") for weight in said["weights"]]
        line = {
            "arrival_s": round(arrival_s, 6),
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "max_new_tokens": cap_tokens,
            "is_cut": is_cut,
            "ttlt_s": round(ttlt_s, 6),
            "prediction": said,
        }
        self._write(json.dumps(line).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self._fd is None:
            self._num_lost += 1
            return
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError("the disk is full")
            self._num_written += 1
        except OSError as error:
            self._num_lost += 1
            self.close()
            logger.error("nothing more is written to %s: %s", self._path, error)

    def stats(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "file": str(self._path),
            "num_written": self._num_written,
            "num_lost": self._num_lost,
            "is_stopped": self._fd is None,
        }

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
