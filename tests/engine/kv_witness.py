"""An SGLang plugin for tests: what prefills have left in the KV pool, and what happens at a cut.

In the scheduler it keeps a digest of the KV of every prompt, in the order in which their prefills
ended, and does at the cuts of a prefill (patches/scheduler/slices.py) what a file orders while it
runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import requests

from bench.engines.server import plugins
from bench.engines.server.server import Server

_ORDERS = "WITNESS_ORDERS"
# What an order may say: what is computed of a prompt's layers is lost at each cut; the scheduler
# stays at the cut until so many requests have come since it was held (tests/engine/stage.py).
ZERO_HIDDEN_STATES = "zero"
AWAIT = "await "


def install(folder: Path) -> dict[str, str]:
    """Make the plugin known to servers with this environment."""
    return plugins.install(folder, __name__) | {_ORDERS: str(folder / "orders")}


def order(folder: Path, what: str) -> None:
    """From now on, at cuts. "" for nothing."""
    (folder / "orders").write_text(what)


def digests(server: Server) -> dict[str, str]:
    """Of the KV of each prompt, by request id, in the order in which their prefills ended."""
    info = requests.get(f"{server.url}/server_info", timeout=300).json()
    found: dict[str, str] = info["internal_states"][0]["witness"]
    return found


def _order() -> str:
    orders = Path(os.environ[_ORDERS])
    return orders.read_text() if orders.exists() else ""


def _bytes(kept: Any) -> Iterator[bytes]:
    """Of nested lists of tensors."""
    if isinstance(kept, list | tuple):
        for each in kept:
            yield from _bytes(each)
    else:
        yield kept.contiguous().numpy().tobytes()


def _digest(scheduler: Any, req: Any) -> str:
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    slots = slots[: len(req.origin_input_ids)]
    found = hashlib.sha256()
    for part in _bytes(scheduler.token_to_kv_pool_allocator.get_cpu_copy(slots)):
        found.update(part)
    return found.hexdigest()


def register() -> None:
    """The entry point."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker

    from patches.scheduler.slices import Slices

    seen: dict[str, str] = {}
    process, state = Scheduler.process_batch_result, Scheduler.get_internal_state
    forward, receive = TpModelWorker.forward_batch_split_prefill, Slices._receive

    @wraps(process)
    def look(self: Any, batch: Any, result: Any, *args: Any, **kw: Any) -> Any:
        if batch.forward_mode.is_extend():
            seen.update((req.rid, _digest(self, req)) for req in batch.reqs)
        return process(self, batch, result, *args, **kw)

    @wraps(state)
    def tell(self: Any, recv_req: Any) -> Any:
        result = state(self, recv_req)
        result.internal_state["witness"] = seen
        return result

    @wraps(forward)
    def spoil(self: Any, batch: Any) -> Any:
        if batch.split_index and _order() == ZERO_HIDDEN_STATES:
            batch.split_forward_batch.hidden_states.zero_()
        return forward(self, batch)

    def stay(self: Slices) -> None:
        receive(self)
        scheduler: Any = self._scheduler
        while (now := _order()).startswith(AWAIT):
            if scheduler.stage.num_arrived >= int(now.removeprefix(AWAIT)):
                break
            receive(self)

    Scheduler.process_batch_result, Scheduler.get_internal_state = look, tell
    TpModelWorker.forward_batch_split_prefill = spoil
    Slices._receive = stay  # type: ignore[method-assign]
