"""Servers, and programs that use SGLang, which tests start without waiting for what takes long, see
cradle.py."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import IO, Any, Self

from bench.servers import server
from bench.servers.policy_server import CPU_ENV

_MODULE = server.STOCK_COMMAND[-1]
_MAX_ANSWER_BYTES = 32
_exec = server.launch


class Born:
    """A server's first process, which is no child of this one."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """None while it is alive."""
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self) -> int:
        """Return once it has ended."""
        select.select([self._pidfd], [], [])
        return 0


class Nursery:
    """In a `with` block. What takes long is done for the first one that is asked for."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self._one_by_one = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Servers that are left end too."""
        if self._orders is not None:
            self._orders.close()
            self._cradle.wait()

    def launch(
        self, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]
    ) -> server.Launched:
        """In the place of bench.servers.server.launch(), which starts all others as users do."""
        # The number of threads is read by what has been imported.
        if tuple(command[:3]) != server.STOCK_COMMAND or not CPU_ENV.items() <= env.items():
            return _exec(command, env, output)
        order = {"module": _MODULE, "argv": [*command[2:]], "env": {**env}}
        pid, pidfds = self._ordered(order, output)
        return Born(pid, *pidfds)

    def run(self, code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Like `python -c code argv` with these variables added to the environment."""
        order = {"code": code, "argv": ["-c", *argv], "env": os.environ | env}
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            exit_code, _ = self._ordered(order, stdout, stderr)
            printed = []
            for file in (stdout, stderr):
                file.seek(0)
                printed.append(file.read().decode())
        return subprocess.CompletedProcess(code, exit_code, *printed)

    def _ordered(self, order: Mapping[str, Any], *outputs: IO[bytes]) -> tuple[int, list[int]]:
        with self._one_by_one:
            orders = self._orders or self._begin()
            fds = [output.fileno() for output in outputs]
            socket.send_fds(orders, [json.dumps(order).encode()], fds)
            answer, pidfds, _, _ = socket.recv_fds(orders, _MAX_ANSWER_BYTES, 1)
        return int(answer), pidfds

    def _begin(self) -> socket.socket:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._cradle = subprocess.Popen(
                [sys.executable, "-m", "tests.cradle", str(theirs.fileno())],
                env=os.environ | CPU_ENV,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return self._orders
