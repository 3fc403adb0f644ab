"""An SGLang plugin: `mooncake.engine` where Mooncake is not installed, for servers on one host.

Mooncake's own engine over TCP needs packages of the system (libibverbs). Of SGLang's backend
`mooncake_tcp` everything else is SGLang's: handshakes, bootstrap server, threads, queues. Here one
process writes into another's memory, as RDMA does (process_vm_writev, Linux only).
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

# PR_SET_PTRACER and PR_SET_PTRACER_ANY, see prctl(2); the most pieces of one call, see readv(2).
_LET_WRITE, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)
_MOST_PIECES = 1024
_TOKEN_S, _REST_S = "SAGE_TEST_KV_TOKEN_S", 5e-4
# A cached prefix is not sent before its step, which would wait for an event of CUDA.
_WITHOUT_CUDA = {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class TransferEngine:
    """What SGLang asks of Mooncake's (mooncake_transfer_engine.py, which wraps it). The port of a
    session is the number of its process."""

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
        """0, or -1 if not all was written."""
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


def install(folder: Path, token_s: float = 0.0) -> dict[str, str]:
    """The environment of the servers that have it. token_s: seconds that the KV of a token takes
    at least, one request after the other."""
    return plugins.install(folder, __name__) | _WITHOUT_CUDA | {_TOKEN_S: str(token_s)}


def register() -> None:
    """The entry point."""
    module = ModuleType("mooncake.engine")
    module.TransferEngine = TransferEngine  # type: ignore[attr-defined]
    sys.modules["mooncake"] = ModuleType("mooncake")
    sys.modules["mooncake.engine"] = module
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVSender
    from sglang.srt.managers.scheduler import Scheduler

    # It would copy indices through pinned memory and wait for an event of CUDA.
    MooncakeKVSender.supports_host_tensor_indices = False
    send, token_s = MooncakeKVManager.send_kvcache, float(os.environ[_TOKEN_S])
    on_idle = Scheduler.on_idle

    def send_in_time(self: Any, session: str, indices: Any, *args: Any, **kw: Any) -> Any:
        time.sleep(len(indices) * self.kv_args.page_size * token_s)
        return send(self, session, indices, *args, **kw)

    def rest(self: Any) -> None:
        on_idle(self)
        # While one of its queues has a request it would take a core to look for news.
        time.sleep(_REST_S)

    MooncakeKVManager.send_kvcache, Scheduler.on_idle = send_in_time, rest
