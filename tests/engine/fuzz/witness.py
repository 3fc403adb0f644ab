"""An SGLang plugin for tests: /server_info shows a scheduler's held resources and lost aborts. It
hooks only SGLang's own functions, so it works under any policy."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.engines.server import plugins
from tests.engine.fuzz import policies
from tests.engine.hooks import around

# The most tokens that an aborted request may still get, from the step in flight and the next one.
_LAST_WORDS = 3


def install(folder: Path) -> dict[str, str]:
    """The environment of a server with the plugin and the fuzzer's policies."""
    return {**plugins.install(folder, __name__), **policies.install(folder)}


def register() -> None:
    """The entry point, called in every process of a server."""
    # The launcher becomes the HTTP process; at this moment it has not imported a scheduler yet.
    if "sglang.srt.managers.scheduler" in sys.modules:
        _watch_scheduler()
    elif "sglang.srt.managers.detokenizer_manager" not in sys.modules:
        _watch_http()


class _Aborts:
    """The aborts of one scheduler. met: aborted requests by their state. lost: aborted requests
    that still ran to their natural end, and how."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.lost: list[str] = []
        self._unfinished: set[str] = set()
        self._early: set[str] = set()
        # By request: its state, its number of tokens, and the step.
        self._pending: dict[str, tuple[str, int, int]] = {}

    def arrive(self, handle: Any, scheduler: Any, req: Any, **kw: Any) -> Any:
        self._unfinished.add(req.rid)
        if req.rid in self._early:
            self._pending[req.rid] = "on its way", 0, 0
        return handle(req, **kw)

    def abort(self, carry_out: Any, scheduler: Any, abort: Any) -> Any:
        found = {
            req.rid: (state, len(req.output_ids), scheduler.forward_ct)
            for state, req in _requests(scheduler)
            if abort.abort_all or (abort.rid and req.rid.startswith(abort.rid))
        }
        self.met.update(state for state, *_ in found.values())
        if abort.rid in self._unfinished and abort.rid not in found:
            found[abort.rid] = "nowhere", 0, 0
        elif abort.rid and not found:
            self._early.add(abort.rid)
        self._pending = found | self._pending
        return carry_out(abort)

    def pause(self, carry_out: Any, scheduler: Any, pause: Any) -> Any:
        # SGLang aborts a chunked prompt before the next step, but not if a pause has moved it to
        # the queue meanwhile (process_pending_chunked_abort in managers/scheduler.py).
        if pause.mode == "retract":
            moved = "chunked", scheduler.forward_ct
            self._pending = {rid: p for rid, p in self._pending.items() if p[::2] != moved}
        return carry_out(pause)

    def finish(self, update: Any, req: Any, *args: Any, **kw: Any) -> None:
        update(*args, **kw)
        if not req.finished() or req.rid not in self._unfinished:
            return
        self._unfinished.remove(req.rid)
        state, num_before, _ = self._pending.pop(req.rid, ("", 0, 0))
        num_more = len(req.output_ids) - num_before
        if state and num_more > _LAST_WORDS and req.finished_reason.to_json()["type"] != "abort":
            self.lost.append(f"{req.rid}, aborted while {state}, said {num_more} more")


def _watch_scheduler() -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    aborts = _Aborts()

    def state(original: Any, scheduler: Any, asked: Any) -> Any:
        result = original(asked)
        pool, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        slots, num_free = scheduler.req_to_token_pool, pool.available_size()
        result.internal_state["witness"] = {
            "aborts_met": aborts.met,
            "lost aborts": aborts.lost,
            "waiting": len(scheduler.waiting_queue),
            "running": len(scheduler.running_batch.reqs),
            "copies": _copies_alive(),
            "locked tokens": tree.protected_size(),
            "missing tokens": scheduler.max_total_num_tokens - num_free - tree.evictable_size(),
            "missing slots": slots.size - len(slots.free_slots),
        }
        return result

    around(Scheduler, "abort_request", aborts.abort)
    around(Scheduler, "pause_generation", aborts.pause)
    around(Scheduler, "handle_generate_request", aborts.arrive)
    around(Scheduler, "get_internal_state", state)
    around(Req, "update_finish_state", aborts.finish)


def _requests(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Return all unfinished requests of a scheduler, with their states."""
    for req in scheduler.waiting_queue:
        yield ("waiting" if req.kv.retraction_backup is None else "swapped"), req
    for req in scheduler.grammar_manager.grammar_queue:
        yield "grammar", req
    if scheduler.chunked_req is not None:
        yield "chunked", scheduler.chunked_req
    for req in scheduler.collect_inflight_reqs():
        if not req.finished():
            yield "running", req


def _copies_alive() -> int:
    """Return the copies of KV in host memory, of any holder."""
    from sglang.srt.mem_cache.common import RetractionBackup

    gc.collect()
    # Type and not isinstance: that would ask every lazy module for its class.
    return sum(type(found) is RetractionBackup for found in gc.get_objects())


def _watch_http() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    async def with_open(original: Any, manager: Any) -> Any:
        states = await original()
        for state in states:
            state["witness"]["open"] = sorted(manager.rid_to_state)
        return states

    around(TokenizerManager, "get_internal_state", with_open)
