"""Runs a real SGLang server in its own processes, for the time of a `with` block."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import psutil
import requests
from tqdm import tqdm

from bench.engines.clock.priority import take_place_of_session
from sage_sched.errors import UserError

Process = subprocess.Popen[bytes]
STOCK_COMMAND = (sys.executable, "-m", "sglang.launch_server")


class ServerError(UserError, RuntimeError):
    """The server did not come up, or died. The message has the end of its log."""


def _reserve_port(first: int = 32000, last: int = 32999) -> tuple[int, IO[str]]:
    """Return a free port in [first, last], and a file to close when done with it.

    A server takes long to listen on its port. Meanwhile a client of a second server on that port
    would reach the first, so the port is locked among servers of this module. SGLang derives
    further ports from the one it is given. A range of ours keeps them clear of ephemeral ports.
    """
    for port in range(first, last + 1):
        lock = (Path(tempfile.gettempdir()) / f"sage-sched-port-{port}.lock").open("w")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                probe.bind(("127.0.0.1", port))
            except OSError:
                lock.close()
                continue
        return port, lock
    raise ServerError(f"no free port between {first} and {last}")


def launch(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Process:
    """Start a server's first process in a session of its own."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_in_child,
    )


def _in_child() -> None:
    """Prepare the process of a server, before it becomes one."""
    take_place_of_session()
    # A benchmark that is killed must not leave a server behind to disturb the next one's timings.
    # SGLang's own processes ask the kernel for the same. (1 is PR_SET_PDEATHSIG, Linux only.)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """`python -m sglang.launch_server --model-path MODEL FLAGS...`, killed as a whole at exit.

    model: a model folder.
    flags: SGLang's own flags; the port is chosen here.
    env: variables added to this process's environment.
    log: the file for its output.
    command: the command that starts the server, up to its first flag.
    start_timeout_s: ServerError is raised if it does not answer by then.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str] = (),
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = STOCK_COMMAND,
        start_timeout_s: float = 900.0,
    ) -> None:
        self.port, self._port_lock = _reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [*command, "--model-path", str(model), "--port", str(self.port), *flags]
        self._env = {**os.environ, **(env or {})}
        self._start_timeout_s = start_timeout_s
        self._process: Process | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = launch(self._command, self._env, output)
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def pid(self) -> int | None:
        """The launched process; None before and after the block."""
        return self._process.pid if self._process is not None else None

    def running(self) -> bool:
        """Whether the launched process is alive."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, num_lines: int = 30) -> str:
        """Return the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def kill(self) -> None:
        """End every process of the server, if there is one."""
        if self._process is None:
            return
        # The launcher leads the session of its scheduler and detokenizer, and the group outlives
        # it: after a crash its children are still there. It is not asked to end first: SGLang
        # checks only every 5 s whether to drain, and its files are written so that a kill loses no
        # committed data.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._port_lock.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        with tqdm(desc="starting server", unit=" s", leave=False, delay=1) as progress:
            while not self._answers():
                if not self.running():
                    raise ServerError(f"the server ended while starting:\n{self.log_tail()}")
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"the server did not answer in {self._start_timeout_s:.0f} s; "
                        f"the end of {self.log}:\n{self.log_tail()}"
                    )
                time.sleep(0.5)
                progress.update(0.5)

    def _answers(self) -> bool:
        # /health answers 503 until the warm-up request is through.
        try:
            is_ready = requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False
        return is_ready and self._listens()

    def _listens(self) -> bool:
        """Whether a process of this server has its port, and not another program."""
        with contextlib.suppress(psutil.Error):
            launched = psutil.Process(self.pid)
            for process in (launched, *launched.children(recursive=True)):
                for socket_of in process.net_connections("tcp"):
                    is_open = socket_of.status == psutil.CONN_LISTEN
                    if is_open and socket_of.laddr.port == self.port:
                        return True
        return False
