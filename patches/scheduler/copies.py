"""Keeps the KV of swapped-out requests in host memory."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.common import backup_kv_cache, discard_kv_cache_backup, restore_kv_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_disagg

from patches.engine_types import Req, Scheduler
from patches.scheduler.kv_arena import KvArena

logger = logging.getLogger(__name__)


def _backend(scheduler: Scheduler) -> str:
    """Return SGLang's backend for copies: the host memory of the hierarchical cache if there is
    one. On a decode server, return the backend that SGLang itself uses. "" if we copy."""
    if scheduler.server_args.disaggregation_mode == "decode":
        return str(get_disagg().disaggregation_decode_retraction_backup)
    tree: Any = scheduler.tree_cache
    has_host_tier = isinstance(tree, UnifiedRadixCache) and tree.supports_retraction_backup()
    return "host_pool" if has_host_tier else ""


def uses_arena(scheduler: Scheduler) -> bool:
    """Whether copies are ours, and not SGLang's."""
    return not _backend(scheduler)


def host_tier_tokens(scheduler: Scheduler) -> int | None:
    """Return the tokens of the hierarchical cache's host memory that copies may take; None without
    such a cache.

    Copies may take the size of that memory minus the size of the device pool. SGLang may fill the
    rest with KV that is also on the device, and does not free it. On a decode server without a
    radix tree, copies may take all of it.
    """
    if _backend(scheduler) != "host_pool":
        return None
    host_tokens: int = scheduler.tree_cache.cache_controller.mem_pool_host.size
    shared_tokens = 0 if scheduler.tree_cache.disable else scheduler.max_total_num_tokens
    return max(0, host_tokens - shared_tokens)


def token_bytes(scheduler: Scheduler) -> int:
    """Return the host memory for the KV of one token on this rank, in bytes."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    size = pool.get_kv_size_bytes()
    return int(-(-(sum(size) if isinstance(size, tuple) else size) // pool.size))


class Copies:
    """The copies of one rank, each kept as `Req.kv.retraction_backup`.

    They are in an arena of ours. With a hierarchical cache, and on a decode server, SGLang makes
    them, and waits for the device.
    """

    def __init__(self, scheduler: Scheduler, num_tokens: int) -> None:
        """num_tokens: the most in host memory. Raises RuntimeError or MemoryError if an arena of
        this size cannot be had."""
        self.num_tokens = num_tokens
        self._scheduler = scheduler
        self._backend = _backend(scheduler)
        self._allocator = scheduler.token_to_kv_pool_allocator
        if not self._backend:
            pool = self._allocator.get_kvcache()
            latent = hasattr(pool, "kv_buffer")
            buffers = pool.kv_buffer if latent else [*pool.k_buffer, *pool.v_buffer]
            self._arena = KvArena([buffer for buffer in buffers if len(buffer)], num_tokens)

    def copied(self, slots: torch.Tensor) -> Any:
        """Copy the KV of these slots. Return None if it has no place."""
        return self._allocator.get_cpu_copy(slots) if self._backend else self._arena.copy_out(slots)

    def fetched(self, copy: Any) -> None:
        """Begin to bring a copy back."""
        if not self._backend:
            self._arena.fetch(copy)

    def written(self, copy: Any, slots: torch.Tensor, num_kept: int = 0) -> None:
        """Write a copy to these slots except the first num_kept, and drop it."""
        if self._backend:
            self._allocator.load_cpu_copy(copy, slots)
        else:
            self._arena.put_back(copy, slots, num_kept)

    def _slots(self, req: Req) -> torch.Tensor:
        """Return the slots of a request's KV. Its newest token has none yet."""
        rows = self._scheduler.req_to_token_pool.req_to_token
        slots: torch.Tensor = rows[req.kv.req_pool_idx, : req.seqlen - 1].long()
        return slots

    def take(self, req: Req) -> bool:
        """Copy a running request's KV, if there is a place. Return False if that fails."""
        try:
            if self._backend:
                return bool(backup_kv_cache(req, *self._memory(), self._backend))
            req.kv.retraction_backup = self.copied(self._slots(req))
            return True
        except (RuntimeError, MemoryError):
            logger.exception("a request's KV could not be copied to host memory")
            return False

    def fetch(self, req: Req) -> None:
        """Begin to bring a request's copy back."""
        self.fetched(req.kv.retraction_backup)

    def put_back(self, req: Req) -> bool:
        """Write a copy to the request's new slots, and drop it. Return False if that fails."""
        try:
            if self._backend:
                restore_kv_cache(req, *self._memory(), self._backend)
            else:
                num_kept = req.kv.cache_protected_len
                self.written(req.kv.retraction_backup, self._slots(req), num_kept)
                req.kv.retraction_backup = None
            return True
        except (RuntimeError, MemoryError):
            logger.exception("a request's KV could not be copied back; it is computed again")
            return False

    def stay(self, req: Req) -> None:
        """Undo fetch."""
        copy: Any = req.kv.retraction_backup
        if not self._backend:
            self._arena.stay(copy)

    def drop(self, req: Req, *, flushed: bool = False) -> None:
        """Drop a request's copy, if it has one. flushed: SGLang has already dropped its part."""
        copy: Any = req.kv.retraction_backup
        if copy is None:
            return
        if not self._backend:
            self._arena.free(copy)
        elif not flushed:
            discard_kv_cache_backup(req, self._scheduler.tree_cache, self._backend)
        req.kv.retraction_backup = None

    def _memory(self) -> tuple[Any, Any, Any]:
        scheduler = self._scheduler
        pool, allocator = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
        return scheduler.tree_cache, pool, allocator
