"""A process that has imported the slow modules, and forks servers for tests.

`python -m tests.cradle FD` starts a server, or a program, for each order that comes over the socket
FD, whose other end is nursery.py. Most of a server's start is imports, in each of its processes.
Here they are done once: other packages, and the parts of SGLang that all its processes import. Each
process imports SGLang's top modules itself, because plugins check which of them are loaded; it does
the same with ours.

A server's subprocesses are forked likewise, from a clean copy of this process: each process of a
server has one as its child.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import random
import runpy
import signal
import socket
import sys
from contextlib import suppress
from itertools import pairwise
from multiprocessing import (
    connection,
    context,
    forkserver,
    popen_forkserver,
    resource_tracker,
    spawn,
)
from typing import Any

import setproctitle

from bench.engines.clock.priority import take_place_of_session

# The slowest imports that all processes of SGLang share, of its own and of other packages.
_OF_SGLANG = (
    "sglang.srt.managers.io_struct", "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.managers.schedule_policy", "sglang.srt.configs",
)  # fmt: skip
_OF_OTHERS = (
    "torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx", "openai.types.responses",
    "openai.types.realtime", "fastapi", "compressed_tensors.config", "xgrammar", "jsonschema",
    "pydantic.v1", "gguf", "aiohttp.web", "uvicorn", "uvloop",
)  # fmt: skip
_MAX_ORDER_BYTES = 1 << 20
_FIRST_FREE_FD = 3
# PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER, see prctl(2).
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36


def main(orders: socket.socket) -> None:
    """Start the requested processes, until the socket is closed."""
    _prctl(_ADOPT_ORPHANS, 1)
    path: list[str] = []
    while True:
        message, outputs, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 2)
        if not message:
            return
        _reap()
        order = json.loads(message)
        if not path and "command" not in order:
            path = _imported()
        if (pid := os.fork()) == 0:
            orders.detach()
            break
        for output in outputs:
            os.close(output)
        _answer(orders, pid, is_awaited="code" in order)
    _take_over(outputs, order["folder"], order["env"])
    if "command" in order:
        os.execvp(order["command"][0], order["command"])
    sys.argv = order["argv"]
    sys.path[:] = [*order["env"].get("PYTHONPATH", "").split(os.pathsep), *path]
    importlib.invalidate_caches()
    _have_cradle()
    if "code" in order:
        sys.path.insert(0, "")
        exec(order["code"], {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _imported() -> list[str]:
    """Import the slow modules. Return the places of packages, without PYTHONPATH and the folder in
    which this process was started."""
    importlib.import_module("sglang.launch_server")
    for name in _OF_OTHERS:
        with suppress(ImportError):
            importlib.import_module(name)
    for name in _OF_SGLANG:
        importlib.import_module(name)
    setproctitle.getproctitle()  # finds the place of titles before the environment changes
    _patch_no_more_than_copies()
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in sys.path[1:] if entry not in named]


def _patch_no_more_than_copies() -> None:
    """Skip SGLang's search of all modules for copies of a hooked function, as methods have none."""
    from sglang.srt.plugins import hook_registry

    propagate = hook_registry._propagate_patch

    def propagated(original: object, wrapped: object, source: object) -> int:
        return 0 if isinstance(source, type) else int(propagate(original, wrapped, source))

    hook_registry._propagate_patch = propagated


def _answer(orders: socket.socket, pid: int, *, is_awaited: bool) -> None:
    """Answer with the process, or with the exit code of a program."""
    if is_awaited:
        orders.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        return
    process = os.pidfd_open(pid)
    socket.send_fds(orders, [str(pid).encode()], [process])
    os.close(process)


def _reap() -> None:
    """Forget the processes that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _take_over(outputs: list[int], folder: str, environment: dict[str, str]) -> None:
    """Become a process as subprocess.Popen would have made it, in a session of its own."""
    os.setsid()
    take_place_of_session()
    _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[-1], 2)
    _close_all_but()
    os.chdir(folder)
    _go_by(environment)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _close_all_but(*kept: int) -> None:
    """Close all files except these and the standard three."""
    bounds = [_FIRST_FREE_FD - 1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in pairwise(bounds):
        os.closerange(before + 1, after)


def _go_by(environment: dict[str, str]) -> None:
    """Take this environment, and random numbers of our own."""
    os.environ.clear()
    os.environ.update(environment)
    random.seed()


def _have_cradle() -> None:
    """Fork a copy of this process, in which its spawned processes start."""
    alive_r, alive_w = os.pipe()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(connection.arbitrary_address("AF_UNIX"))
    listener.listen()
    if os.fork() == 0:
        _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        _close_all_but(listener.fileno(), alive_r)
        # A failing scheduler signals its parent, which has to signal the process that spawned it.
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
        try:
            forkserver.main(listener.detach(), alive_r, [])
        finally:
            os._exit(0)
    os.close(alive_r)
    cradle = forkserver._forkserver  # type: ignore[attr-defined]
    cradle._forkserver_address = listener.getsockname()
    cradle._forkserver_alive_fd = alive_w
    listener.close()


def _spawn_in_cradles() -> None:
    """Make Python's "spawn" use that copy, in this process and all that come of it."""
    preparation, prepare, begin = spawn.get_preparation_data, spawn.prepare, spawn._main

    def with_environment(name: str) -> dict[str, Any]:
        return {**preparation(name), "environment": dict(os.environ)}

    def prepare_with_environment(data: dict[str, Any]) -> None:
        _go_by(data.pop("environment"))
        prepare(data)

    def begin_with_cradle(fd: int, parent_sentinel: int) -> Any:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        _have_cradle()
        return begin(fd, parent_sentinel)

    spawn.get_preparation_data = with_environment
    spawn.prepare = prepare_with_environment
    spawn._main = begin_with_cradle
    context.SpawnProcess._Popen = staticmethod(popen_forkserver.Popen)
    forkserver.ForkServer.ensure_running = lambda self: resource_tracker.ensure_running()


if __name__ == "__main__":
    _spawn_in_cradles()
    main(socket.socket(fileno=int(sys.argv[1])))
