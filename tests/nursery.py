"""Servers that tests start without waiting for what takes long, see cradle.py."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from bench.servers import server
from bench.servers.policy_server import CPU_ENV

_MODULE = server.STOCK_COMMAND[-1]
_MAX_PID_BYTES = 32
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
    """Starts servers' first processes; what takes long is done for the first one."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None

    def launch(
        self, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]
    ) -> server.Launched:
        """In the place of bench.servers.server.launch(), which starts all others as users do."""
        if not _is_born_here(command, env):
            return _exec(command, env, output)
        orders = self._orders or self._begin()
        _, _, *argv = command
        order = {"module": _MODULE, "argv": argv, "env": dict(env)}
        socket.send_fds(orders, [json.dumps(order).encode()], [output.fileno()])
        pid, (pidfd,), _, _ = socket.recv_fds(orders, _MAX_PID_BYTES, 1)
        return Born(int(pid), pidfd)

    def close(self) -> None:
        """End; servers that are left end too."""
        if self._orders is not None:
            self._orders.close()
            self._cradle.wait()

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


def _is_born_here(command: Sequence[str], env: Mapping[str, str]) -> bool:
    # The number of threads is read by what has been imported.
    return tuple(command[:3]) == server.STOCK_COMMAND and CPU_ENV.items() <= env.items()
