"""An SGLang plugin for tests: each process of a server records its events, in order.

It hooks SGLang's own functions only, so it records the same under any policy. A scheduler records
arrivals, aborts with the request's state, and ends; the HTTP process records requests,
aborts and answers.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.engines.server import plugins
from tests.engine.fuzz import policies

_FOLDER = "FUZZ_WITNESS_FOLDER"


def install(folder: Path) -> dict[str, str]:
    """The environment of a server whose processes write to `folder`."""
    return {
        **plugins.install(folder / "plugin", __name__),
        **policies.install(folder / "plugin"),
        _FOLDER: str(folder),
    }


def register() -> None:
    """The entry point, called in every process of a server."""
    # The launcher becomes the HTTP process; at this moment it has not imported a scheduler yet.
    if "sglang.srt.managers.scheduler" in sys.modules:
        _watch_scheduler()
    elif "sglang.srt.managers.detokenizer_manager" not in sys.modules:
        _watch_http()


class _Notes:
    """A file of one process, a JSON object a line, complete up to the moment of its death."""

    def __init__(self, name: str) -> None:
        path = Path(os.environ[_FOLDER]) / f"{name}.jsonl"
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, event: str, **what: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **what}) + "\n")


def _noted(
    owner: Any,
    name: str,
    before: Callable[..., None] = lambda *args, **kw: None,
    after: Callable[..., None] = lambda *args, **kw: None,
) -> None:
    """Call `before` with a method's arguments at each of its calls, and `after` with its result and
    its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **kw: Any) -> Any:
        before(*args, **kw)
        result = original(*args, **kw)
        after(result, *args, **kw)
        return result

    setattr(owner, name, noted)


def _watch_scheduler() -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_parallel

    notes: _Notes | None = None

    def start(result: None, scheduler: Any, *args: Any, **kw: Any) -> None:
        nonlocal notes
        ranks = get_parallel()
        notes = _Notes(f"scheduler-dp{ranks.dp_rank or 0}-tp{ranks.tp_rank}")

    def write(event: str, **what: Any) -> None:
        if notes is not None:
            notes.write(event, **what)

    def abort(scheduler: Any, abort: Any) -> None:
        met = {
            req.rid: [state, len(req.output_ids)]
            for state, req in _requests(scheduler)
            if abort.abort_all or (abort.rid and req.rid.startswith(abort.rid))
        }
        write("abort", rid=abort.rid, all=abort.abort_all, met=met, step=scheduler.forward_ct)

    def pause(scheduler: Any, pause: Any) -> None:
        write("pause", mode=pause.mode, step=scheduler.forward_ct)

    def arrive(scheduler: Any, req: Any, **kw: Any) -> None:
        write("arrive", rid=req.rid)

    def state(result: Any, scheduler: Any, *args: Any, **kw: Any) -> None:
        pool, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        slots, num_free = scheduler.req_to_token_pool, pool.available_size()
        result.internal_state["witness"] = {
            "waiting": len(scheduler.waiting_queue),
            "running": len(scheduler.running_batch.reqs),
            "copies": _copies_alive(),
            "locked_tokens": tree.protected_size(),
            "missing_tokens": scheduler.max_total_num_tokens - num_free - tree.evictable_size(),
            "missing_slots": slots.size - len(slots.free_slots),
        }

    def finish(result: Any, req: Any, *args: Any, **kw: Any) -> None:
        if req.finished() and not hasattr(req, "fuzz_finished"):
            req.fuzz_finished = True
            reason = req.finished_reason.to_json()["type"]
            write("finish", rid=req.rid, reason=reason, tokens=len(req.output_ids))

    def flushed(success: bool, scheduler: Any, *args: Any, **kw: Any) -> None:
        if not success and scheduler._engine_paused:
            write("flush refused", blockers=_flush_blockers(scheduler))

    _noted(Scheduler, "__init__", after=start)
    _noted(Scheduler, "abort_request", abort)
    _noted(Scheduler, "pause_generation", pause)
    _noted(Scheduler, "handle_generate_request", arrive)
    _noted(Scheduler, "get_internal_state", after=state)
    _noted(Scheduler, "flush_cache", after=flushed)
    _noted(Req, "update_finish_state", after=finish)


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


def _flush_blockers(scheduler: Any) -> dict[str, list[str]]:
    """Return the requests for which a paused scheduler keeps its KV, by where they are."""
    waiting = [req for req in scheduler.waiting_queue if req.kv.holds_kv]
    last_batch, chunked = scheduler.last_batch, scheduler.chunked_req
    found = {
        "grammar": scheduler.grammar_manager.grammar_queue,
        "waiting turn": [req for req in waiting if req.session and req.session.streaming],
        "waiting": [req for req in waiting if not (req.session and req.session.streaming)],
        "running": scheduler.running_batch.reqs,
        "last batch": [] if last_batch is None else last_batch.reqs,
        "chunked": [] if chunked is None else [chunked],
    }
    return {place: [req.rid for req in reqs] for place, reqs in found.items() if reqs}


def _copies_alive() -> int:
    """Return the copies of KV in host memory, of any holder."""
    from sglang.srt.mem_cache.common import RetractionBackup

    gc.collect()
    # Type and not isinstance: that would ask every lazy module for its class.
    return sum(type(found) is RetractionBackup for found in gc.get_objects())


def _watch_http() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    notes = _Notes("http")

    def rids(request: Any) -> list[str]:
        return [request.rid] if isinstance(request.rid, str) else list(request.rid)

    def let_in(manager: Any, request: Any, *args: Any, **kw: Any) -> None:
        notes.write("let in", rids=rids(request))

    def abort(manager: Any, rid: str = "", abort_all: bool = False) -> None:
        known = [
            name
            for name, state in manager.rid_to_state.items()
            if (abort_all or name == rid) and not state.finished
        ]
        notes.write("abort", rid=rid, all=abort_all, known=known)

    def output(manager: Any, batch: Any) -> None:
        for rid, reason in zip(batch.rids, batch.finished_reasons, strict=True):
            if reason is not None and rid in manager.rid_to_state:
                notes.write("finish", rid=rid, reason=reason["type"])

    _noted(TokenizerManager, "_validate_and_resolve_lora", let_in)
    _noted(TokenizerManager, "abort_request", abort)
    _noted(TokenizerManager, "_handle_batch_output", output)

    original = TokenizerManager.get_internal_state

    async def with_open(self: Any) -> Any:
        states = await original(self)
        for state in states:
            state["witness"]["open"] = sorted(self.rid_to_state)
        return states

    TokenizerManager.get_internal_state = with_open
