"""Swaps the KV of a running request out to host memory, and back in without a prefill.

SGLang has both halves for prefill/decode disaggregation (mem_cache/common.py,
disaggregation/decode.py, decode_schedule_batch_mixin.py). This module combines them on one server.
Nothing is recomputed, so the answer stays the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.common import (
    backup_kv_cache,
    discard_kv_cache_backup,
    evict_from_tree_cache,
    match_kv_cache,
    release_kv_cache,
    restore_kv_cache,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_disagg

from patches.engine_types import Batch, Req, Scheduler

logger = logging.getLogger(__name__)


def _backend(scheduler: Scheduler) -> str:
    """Return SGLang's backend for copies: the host memory of the hierarchical cache if there is
    one. On a decode server, return the backend that SGLang itself uses."""
    if scheduler.server_args.disaggregation_mode == "decode":
        return str(get_disagg().disaggregation_decode_retraction_backup)
    tree: Any = scheduler.tree_cache
    has_host_tier = isinstance(tree, UnifiedRadixCache) and tree.supports_retraction_backup()
    return "host_pool" if has_host_tier else "cpu_tensor"


def host_tier_tokens(scheduler: Scheduler) -> int | None:
    """Return the tokens of the hierarchical cache's host memory that copies may take; None without
    such a cache.

    Copies may take the size of that memory minus the size of the device pool. SGLang may fill the
    rest with KV that is also on the device, and does not free it. On a decode server without a
    radix tree, copies may take all of it.
    """
    if _backend(scheduler) == "cpu_tensor":
        return None
    host_tokens: int = scheduler.tree_cache.cache_controller.mem_pool_host.size
    shared_tokens = 0 if scheduler.tree_cache.disable else scheduler.max_total_num_tokens
    return max(0, host_tokens - shared_tokens)


def least(scheduler: Scheduler, number: int) -> int:
    """Return the minimum of a number over all ranks that serve the same requests. These ranks must
    make the same decisions.

    Trap: each of these ranks has to call this. Under DP attention each group of ranks decides
    alone.
    """
    group = scheduler.attn_tp_group
    if group.world_size == 1:
        return number
    numbers = torch.tensor([number], dtype=torch.int64)
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(numbers.item())


def is_swapped(req: Req) -> bool:
    """Whether a waiting request's KV is in host memory."""
    return req.kv.retraction_backup is not None


def swapped(waiting: Iterable[Req]) -> list[Req]:
    """Return the requests whose KV is in host memory, in order."""
    return [req for req in waiting if is_swapped(req)]


def can_be_preempted_now(req: Req) -> bool:
    """Whether a running request can be preempted now: it has a first token and more than one to
    come."""
    return not (
        req.finished()
        or req.to_finish is not None
        or not req.output_ids
        or req.next_output_finishes_by_length()
    )


def freed_tokens(scheduler: Scheduler, req: Req) -> int:
    """Return the KV tokens that admission would get back if a running request left the device.

    They are the tokens that it holds alone, and tokens of the radix tree that no other request
    locks. To count the latter, this releases the request's lock and takes it again.
    """
    alone: int = req.kv.kv_allocated_len - req.kv.cache_protected_len
    if req.lock is None:
        return alone
    tree = scheduler.tree_cache
    before: int = tree.evictable_size()
    tree.unlock(req.lock)
    unlocked: int = tree.evictable_size() - before
    req.lock = tree.lock(req.lock.node)
    return alone + unlocked


def token_bytes(scheduler: Scheduler) -> int:
    """Return the host memory for the KV of one token on this rank, in bytes."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    size = pool.get_kv_size_bytes()
    return int(-(-(sum(size) if isinstance(size, tuple) else size) // pool.size))


def swap_out(scheduler: Scheduler, running_batch: Batch, req: Req) -> bool:
    """Copy a running request's KV to host memory and take the request off the device. Return False,
    and change nothing, if the copy fails on any rank.

    A token whose forward pass is in flight is dropped with its KV, because SGLang skips the results
    of retracted requests. It is computed again after swap_in.
    """
    try:
        copied = backup_kv_cache(
            req,
            scheduler.tree_cache,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            _backend(scheduler),
        )
    except (RuntimeError, MemoryError):
        logger.exception("a request's KV could not be copied to host memory; it goes on running")
        copied = False
    if not least(scheduler, copied):  # it failed on some rank
        drop(scheduler, req)
        return False
    req.sage.shared_slots = _in_tree(scheduler, req)
    retract(running_batch, req)
    return True


def retract(running_batch: Batch, req: Req) -> None:
    """Take a running request off the device, as SGLang does when memory runs out. It loses its KV,
    except for the part of its prompt in the radix tree."""
    num_others = len(running_batch.reqs) - 1
    # With offload_kv, a decode server would copy its KV to host memory.
    running_batch.release_req(running_batch.reqs.index(req), num_others, offload_kv=False)
    _remove(running_batch, req)


def retract_chunked(scheduler: Scheduler) -> Req:
    """Retract the prompt that is being chunked, as SGLang does when it is paused."""
    req = scheduler.chunked_req
    assert req is not None
    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()
    scheduler.chunked_req = None
    req.time_stats.set_wait_queue_entry_time()
    return req


def frees_memory(req: Req) -> bool:
    """Whether retracting a running request frees its KV. A streaming session keeps it, and SGLang
    aborts beams instead of retracting them."""
    return req.beam_group is None and not getattr(req.session, "streaming", False)


def preempt_to_tree(scheduler: Scheduler, running_batch: Batch, req: Req) -> None:
    """Take a running request off the device and leave its KV in the radix tree, where it may be
    evicted. The request waits and is prefilled like any other, except for the KV that the tree
    still has."""
    release_kv_cache(req, scheduler.tree_cache, checkpoint=True)
    req.reset_for_retract()
    _remove(running_batch, req)


def _remove(running_batch: Batch, req: Req) -> None:
    others = [i for i, other in enumerate(running_batch.reqs) if other is not req]
    running_batch.filter_batch(keep_indices=others)
    req.time_stats.set_wait_queue_entry_time()


def drop(scheduler: Scheduler, req: Req) -> None:
    """Drop the copy of a request's KV. The request will be recomputed, as after any retraction."""
    discard_kv_cache_backup(req, scheduler.tree_cache, _backend(scheduler))


def swap_in(
    scheduler: Scheduler, reqs: Sequence[Req], running: Sequence[Req]
) -> tuple[Batch | None, list[Req]]:
    """Bring requests back to the device. Return the batch to merge into the running one (None if it
    would be empty), and the requests that have to keep waiting.

    After the first request without room, no further one is brought back. Trap: call this only if no
    request was swapped out since the last step was launched. Otherwise a result in flight would be
    taken for a result of a request that has come back.

    running: the requests that decode with them.
    """
    if scheduler.enable_overlap and scheduler.device != "cpu":
        # A forward pass in flight may still write to freed slots.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
    back: list[Req] = []
    left: list[Req] = []
    for req in reqs:
        has_room = not swapped(left) and has_adapter(scheduler, req, [*running, *back])
        (back if has_room and _restored(scheduler, req) else left).append(req)
    if not back:
        return None, left
    return _prebuilt(scheduler, back), left


def counts_tokens(req: Req) -> bool:
    """Whether SGLang counts the request's tokens (penalties, min_new_tokens)."""
    sampling = req.sampling_params
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.min_new_tokens
    )


def lost_part(req: Req) -> str | None:
    """Return the part of a request that SGLang does not restore when SGLang resumes the request;
    None if SGLang restores everything."""
    if req.grammar is not None:
        return "a grammar on a decode server"
    return "a count of its tokens on a decode server" if counts_tokens(req) else None


def _prebuilt(scheduler: Scheduler, reqs: list[Req]) -> Any:
    """Return a batch that needs no forward pass, as SGLang's decode servers make one from KV that
    arrives over the network."""
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_prebuilt()
    # A request's grammar has accepted all tokens so far. process_prebuilt would make it accept the
    # newest once more. Only some backends' grammars guard against that.
    grammars = [req.grammar for req in reqs]
    for req in reqs:
        req.grammar = None
    try:
        batch.process_prebuilt(scheduler.future_map)
    finally:
        for req, grammar in zip(reqs, grammars, strict=True):
            req.grammar = grammar
    return batch


def _restored(scheduler: Scheduler, req: Req) -> bool:
    """Bring one request back and return whether it is on the device.

    It keeps its copy if the device has no room. It loses the copy, and will be recomputed, if the
    copy cannot be written back on some rank.
    """
    num_tokens = req.seqlen - 1  # the newest token has no KV yet
    kept = _locked_again(scheduler, req)
    # All ranks have room or none has, because their pools are alike.
    if not _given_room(scheduler, req, num_tokens, kept):
        scheduler.tree_cache.unlock(req.lock)
        req.lock = None
        return False
    pool, allocator = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    req.kv.kv_committed_len = num_tokens
    req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
    req.prefix_len, req.extend_end = 0, num_tokens
    try:
        restore_kv_cache(req, scheduler.tree_cache, pool, allocator, _backend(scheduler))
        pool.write((req.kv.req_pool_idx, slice(0, len(kept))), kept.to(torch.int32))
        restored = True
    except (RuntimeError, MemoryError):
        logger.exception("a request's KV could not be copied back; it is computed again")
        restored = False
    if not least(scheduler, restored):  # it failed on some rank
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
        req.reset_for_retract()
        drop(scheduler, req)
        return False
    req.sage.shared_slots = ()
    req.time_stats.set_forward_entry_time()
    return True


def has_adapter(scheduler: Scheduler, req: Req, others: Sequence[Req]) -> bool:
    """Whether a request's LoRA adapter fits in with the adapters of the others. SGLang checks this
    before prefills only."""
    if not scheduler.enable_lora:
        return True
    beside = {other.lora_id for other in others}
    if not scheduler.enable_lora_overlap_loading:
        return bool(scheduler.can_schedule_lora_req(req, beside))
    # Trap: with overlapped loading SGLang's own check starts a load, and the progress of loads
    # differs between ranks.
    adapters = scheduler.tp_worker.model_runner.lora_manager
    return req.lora_id in beside or bool(adapters.validate_lora_batch({req.lora_id, *beside}))


def _in_tree(scheduler: Scheduler, req: Req) -> torch.Tensor:
    """Return the slots of a running request's KV in the radix tree; empty if it could not use them
    when it comes back."""
    uses_tree = scheduler.server_args.disaggregation_mode == "null"
    uses_tree = uses_tree and _backend(scheduler) == "cpu_tensor"
    num_tokens = req.kv.cache_protected_len if uses_tree else 0
    row: torch.Tensor = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :num_tokens]
    return row.clone()


def _locked_again(scheduler: Scheduler, req: Req) -> torch.Tensor:
    """Lock a swapped-out request's KV that is still in the radix tree, and return its slots in
    whole pages.

    Only the slots that it left count: KV that was evicted and recomputed may differ in its last
    bits.
    """
    left: torch.Tensor = req.sage.shared_slots
    if not len(left):
        return left
    tree = scheduler.tree_cache
    found = match_kv_cache(req, tree, (req.origin_input_ids + req.output_ids)[: len(left)])
    slots: torch.Tensor = tree.prefix_device_indices(req)
    num_same = int((left[: len(slots)] == slots).cumprod(0).sum())
    num_kept = num_same // scheduler.page_size * scheduler.page_size
    if num_kept:
        req.lock = tree.lock(found.last_device_node)
    return slots[:num_kept]


def _given_room(scheduler: Scheduler, req: Req, num_tokens: int, kept: torch.Tensor) -> bool:
    """Give a swapped-out request a row, and slots for its KV except the part kept in the tree.
    Return False, and allocate nothing, if there is no room.

    This checks for room first, because a failed allocation has side effects.
    """
    pool, allocator = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    num_kept = len(kept)
    num_paged = -(-(num_tokens - num_kept) // scheduler.page_size) * scheduler.page_size
    evict_from_tree_cache(scheduler.tree_cache, num_paged)
    if allocator.available_size() < num_paged or pool.available_size() < 1:
        return False
    pool.alloc([req])
    slots = alloc_for_decode_prealloc(
        allocator,
        req=req,
        fill_len=num_tokens,
        delta_len=num_tokens - num_kept,
        prefix_len=num_kept,
        total_prefix_len=num_kept,
        prefix_indices=kept,
        uses_swa_tail=False,
        swa_tail_len=0,
        req_to_token_pool=pool,
    )
    # SGLang's copy of the kept part goes to slot 0, which is padding.
    row = torch.cat([torch.zeros_like(kept, dtype=torch.int32), slots.to(torch.int32)])
    pool.write((req.kv.req_pool_idx, slice(0, num_tokens)), row)
    req.kv.cache_protected_len = num_kept
    return True
