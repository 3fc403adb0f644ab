"""Runs a server's own prediction worker, in a process that ends with this one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import zmq

import sage_sched
from predictor_store.service.endpoint import PredictorError, remove_dead
from predictor_store.store.file import StoreError
from sage_sched.app.config import SageConfig

# Loading takes seconds, and minutes on a busy host.
START_TIMEOUT_SECONDS = 600.0
_CLOSE_TIMEOUT_SECONDS = 10.0
WORKER_MODULE = "predictor_store.service.worker_process"
# The line that a worker writes when it listens.
READY = "ready\n"
# The worker must not take cores from the engine, nor use the network.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_FOLDER_PREFIX, _SOCKET_NAME = "sage-sched-", "predictor.socket"
# mkdtemp adds 8 characters to the prefix.
_NUM_ADDED_CHARS = len(f"/{_FOLDER_PREFIX}{'x' * 8}/{_SOCKET_NAME}")
_LEAST_AGE_S = 60.0


class OwnProcess:
    def __init__(self, config: SageConfig, path: str) -> None:
        """Start a worker; block until it listens on the Unix socket at path. Raises StoreError,
        PredictorError."""
        Path(path).parent.mkdir(mode=0o700, exist_ok=True)
        sections = {
            "store": dataclasses.asdict(config.store),
            "predictor": dataclasses.asdict(config.predictor) | {"service": path},
        }
        # -P: Python must not look for modules in the directory where the server was started, which
        # may have a queue.py, for example. A checkout may be on no path, so its folder is added.
        # Of an environment it would come before Python's own modules.
        folder = str(Path(sage_sched.__file__).parents[1])
        ours = "" if folder == sysconfig.get_path("purelib") else folder
        folders = (ours, os.environ.get("PYTHONPATH", ""))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER_MODULE, str(os.getpid()), json.dumps(sections)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
        )
        try:
            said = self._first_line()
            if said != READY:
                raise (
                    StoreError(said.strip())
                    if said
                    else PredictorError(
                        "the prediction worker ended while it started; its own output says why"
                    )
                )
        except BaseException:
            self.kill()
            raise

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            if not select.select([said], [], [], START_TIMEOUT_SECONDS)[0]:
                raise PredictorError(
                    f"the prediction worker was not ready after {START_TIMEOUT_SECONDS:.0f} s"
                )
            return said.readline()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Block until the worker has ended."""
        self._process.wait()

    def close(self) -> None:
        """Let the worker write the messages that it has received. Blocks until it has ended."""
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def private_path() -> str:
    """Return a new path for a Unix socket that only this user can reach. The worker removes its
    folder. Raises PredictorError if there is no folder for it."""
    folder = socket_folder()
    _remove_left(folder)
    try:
        return str(Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=folder)) / _SOCKET_NAME)
    except OSError as error:
        raise PredictorError(f"cannot make a folder for a socket in {folder}: {error}") from error


def socket_folder() -> str:
    """Return the folder for temporary files, or /tmp if the path of a socket would be too long
    there. Batch systems set such a TMPDIR. mkdtemp keeps other users out of either."""
    folder = tempfile.gettempdir()
    num_bytes = len(os.fsencode(folder)) + _NUM_ADDED_CHARS
    return folder if num_bytes <= zmq.IPC_PATH_MAX_LEN else "/tmp"


def _remove_left(folder: str) -> None:
    """Remove the folders that were left by this user's servers if they and their workers were
    killed."""
    for left in Path(folder).glob(f"{_FOLDER_PREFIX}*/{_SOCKET_NAME}"):
        with contextlib.suppress(OSError, PredictorError):
            # A newer folder may belong to a worker that is just starting.
            if time.time() - left.lstat().st_mtime > _LEAST_AGE_S:
                remove_dead(left)
                left.parent.rmdir()
