"""Servers and programs that use SGLang, started without slow imports."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import IO, Any

from bench.engines.server import server
from bench.engines.server.policy_server import CPU_ENV

_MAX_ANSWER_BYTES = 32
# The models of bench/engines/server/model.py and tests/engine, and the models that these import.
_MODELS = {
    "llama", "mixtral", "minicpm3", "qwen3", "gemma2", "qwen2_vl", "lfm2", "gemma4_causal",
}  # fmt: skip


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
        """Wait for its end."""
        select.select([self._pidfd], [], [])
        return 0


class Nursery:
    """Starts processes by tests/cradle.py, which does the slow imports at the first request."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self._one_by_one = Lock()

    def close(self) -> None:
        """End the cradle, and any servers left."""
        if self._orders is not None:
            self._orders.close()
            self._cradle.wait()

    def launch(self, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Born:
        """Replaces bench.engines.server.server.launch(). Commands other than SGLang's usual one
        start as users start them, which takes four times as long."""
        order: dict[str, Any] = {"command": [*command]}
        # Imported modules have read the number of threads and the interpreter of Triton's kernels.
        if tuple(command[:3]) == server.STOCK_COMMAND and CPU_ENV.items() <= env.items():
            env = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models()), **env}
            if "TRITON_INTERPRET" not in env:
                order = {"module": command[2], "argv": [*command[2:]]}
        pid, pidfds = self._ordered(order | {"env": {**env}}, output)
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

    def _ordered(self, order: dict[str, Any], *outputs: IO[bytes]) -> tuple[int, list[int]]:
        """Return the number in the answer, and the files that come with it."""
        order["folder"] = os.getcwd()
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


def other_models() -> list[str]:
    """Return SGLang's modules of models that no test uses, which each scheduler would import."""
    (folder,) = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr]
    models = {file.stem for file in Path(folder, "srt", "models").glob("*.py")}
    return sorted(models - _MODELS)
