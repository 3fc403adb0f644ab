"""Takes running requests off the device, and lets them decode on without a prefill.

SGLang has both halves for prefill/decode disaggregation (mem_cache/common.py,
disaggregation/decode.py, decode_schedule_batch_mixin.py). This module combines them on one server.
Nothing is recomputed, so the answer stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.common import evict_from_tree_cache, match_kv_cache, release_kv_cache

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.copies import uses_arena


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


def leave(scheduler: Scheduler, running_batch: Batch, req: Req) -> None:
    """Take a running request whose KV has been copied off the device.

    A token whose forward pass is in flight is dropped with its KV, because SGLang skips the results
    of retracted requests. It is computed again when the request is back.
    """
    req.sage.shared_nodes = _in_tree(scheduler, req)
    retract(running_batch, req)


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


def take_room(scheduler: Scheduler, req: Req, others: Sequence[Req]) -> bool:
    """Give a request whose KV is in host memory a row and slots, for put_back. Return False, and
    change nothing, if there is no room.

    others: the requests that decode with it, whose adapters must fit in with its own.
    """
    if not has_adapter(scheduler, req, others):
        return False
    num_tokens = req.seqlen - 1  # the newest token has no KV yet
    kept = _locked_again(scheduler, req)
    # All ranks have room or none has, because their pools are alike.
    if not _given_room(scheduler, req, num_tokens, kept):
        scheduler.tree_cache.unlock(req.lock)
        req.lock = None
        return False
    req.kv.kv_committed_len = num_tokens
    req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
    req.prefix_len, req.extend_end = 0, num_tokens
    return True


def give_room_back(scheduler: Scheduler, req: Req) -> None:
    """Undo take_room."""
    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()


def resumed(scheduler: Scheduler, reqs: Sequence[Req]) -> Batch | None:
    """Return the batch to merge into the running one for requests whose KV is back; None if there
    is none."""
    for req in reqs:
        req.sage.shared_nodes = {}
        req.time_stats.set_forward_entry_time()
    return _prebuilt(scheduler, [*reqs]) if reqs else None


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


def _prebuilt(scheduler: Scheduler, reqs: list[Req]) -> Batch:
    """Return a batch that needs no forward pass, as SGLang's decode servers make one from KV that
    arrives over the network."""
    batch: Any = ScheduleBatch.init_new(
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
    made: Batch = batch
    return made


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


def _in_tree(scheduler: Scheduler, req: Req) -> dict[int, int]:
    """Return the nodes of the radix tree that a running request locks: how many tokens end with
    each. Empty if it could not use them when it comes back."""
    if req.lock is None or not uses_arena(scheduler):
        return {}
    (path,) = scheduler.tree_cache.tree_core.collect_path_info([req.lock.node])
    return {node.node_id: node.path_end for node in path}


def _locked_again(scheduler: Scheduler, req: Req) -> torch.Tensor:
    """Lock a swapped-out request's KV that is still in the radix tree, and return its slots.

    Only the nodes that it left count: KV that was evicted and recomputed may differ in its last
    bits. A node keeps its number when its front part is split off. The device is not asked, because
    the host would have to wait for the answer.
    """
    left: dict[int, int] = req.sage.shared_nodes
    tree, most = scheduler.tree_cache, max(left.values(), default=0)
    num_kept = 0
    if left:
        found = match_kv_cache(req, tree, (req.origin_input_ids + req.output_ids)[:most])
        (path,) = tree.tree_core.collect_path_info([found.last_device_node])
        ends = (node.path_end for node in path if left.get(node.node_id) == node.path_end)
        num_kept = max(ends, default=0)
    if not num_kept:
        rows = scheduler.req_to_token_pool.req_to_token
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    slots: torch.Tensor = tree.prefix_device_indices(req)
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
    row = torch.cat([kept.to(torch.int32), slots.to(torch.int32)])
    pool.write((req.kv.req_pool_idx, slice(0, num_tokens)), row)
    req.kv.cache_protected_len = num_kept
    return True
