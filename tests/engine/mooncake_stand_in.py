"""An SGLang plugin that provides `mooncake.engine` without Mooncake, for servers on one host.

Mooncake's own engine over TCP needs system packages (libibverbs). The rest of SGLang's backend
`mooncake_tcp` is SGLang's own: handshakes, bootstrap server, threads, queues. Here one process
writes into another's memory, as RDMA does (process_vm_writev, Linux only).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.engines.server import plugins

# PR_SET_PTRACER and PR_SET_PTRACER_ANY, see prctl(2); the maximum pieces per call, see readv(2).
_LET_WRITE, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)
_MOST_PIECES = 1024
_REST_S = 5e-4
# Do not send a cached prefix before its step: that would wait for a CUDA event.
_WITHOUT_CUDA = {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class TransferEngine:
    """The methods of Mooncake's engine that SGLang calls (mooncake_transfer_engine.py, which wraps
    it). The port of a session is the id of its process."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        self._libc.prctl(_LET_WRITE, _ANYBODY, 0, 0, 0)
        return 0

    def get_rpc_port(self) -> int:
        return os.getpid()

    def register_memory(self, *_: object) -> int:
        return 0

    unregister_memory = batch_register_memory = batch_unregister_memory = register_memory

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        return self.batch_transfer_sync_write(session, [source], [target], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write the pieces. Return 0, or -1 if some were not written."""
        pid = int(session.rpartition(":")[2])
        pieces = [*zip(sources, targets, lengths, strict=True)]
        for first in range(0, len(pieces), _MOST_PIECES):
            part = pieces[first : first + _MOST_PIECES]
            here = (_Piece * len(part))(*(_Piece(source, length) for source, _, length in part))
            there = (_Piece * len(part))(*(_Piece(target, length) for _, target, length in part))
            written = self._libc.process_vm_writev(pid, here, len(part), there, len(part), 0)
            if written != sum(length for *_, length in part):
                return -1
        return 0


def install(folder: Path) -> dict[str, str]:
    """Return the environment of servers with this plugin."""
    return plugins.install(folder, __name__) | _WITHOUT_CUDA


def register() -> None:
    """Install the engine. This is the plugin's entry point."""
    module = ModuleType("mooncake.engine")
    module.TransferEngine = TransferEngine  # type: ignore[attr-defined]
    sys.modules["mooncake"] = ModuleType("mooncake")
    sys.modules["mooncake.engine"] = module
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    from sglang.srt.managers.scheduler import Scheduler

    # SGLang would copy indices through pinned memory and wait for a CUDA event.
    MooncakeKVSender.supports_host_tensor_indices = False
    on_idle = Scheduler.on_idle

    def rest(self: Any) -> None:
        on_idle(self)
        # Without this pause it would poll on a full core while one of its queues has a request.
        time.sleep(_REST_S)

    Scheduler.on_idle = rest
