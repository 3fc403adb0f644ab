"""KV of a running request that yields: to host memory, and back without a prefill.

SGLang has both halves for prefill/decode disaggregation; what is here puts them together on one
server (mem_cache/common.py, disaggregation/decode.py, decode_schedule_batch_mixin.py). The tokens
that come after are the very ones that would have come (nothing is computed again).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.common import (
    backup_kv_cache,
    discard_kv_cache_backup,
    evict_from_tree_cache,
    release_kv_cache,
    restore_kv_cache,
)

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.ranks import least

logger = logging.getLogger(__name__)

_BACKEND = "cpu_tensor"


def is_swapped(req: Req) -> bool:
    """Whether a waiting request's KV is in host memory."""
    return req.kv.retraction_backup is not None


def swapped(waiting: Iterable[Req]) -> list[Req]:
    """Those whose KV is in host memory, in their order."""
    return [req for req in waiting if is_swapped(req)]


def can_leave_now(req: Req) -> bool:
    """Whether a running request has a first token and more than one to come."""
    return not (
        req.finished()
        or req.to_finish is not None
        or not req.output_ids
        or req.next_output_finishes_by_length()
    )


def freed_tokens(scheduler: Scheduler, req: Req) -> int:
    """KV tokens that a running request's leaving would give back to admission.

    They are those that it holds alone, and those of the radix tree that nobody else locks: a
    prompt's beginning that another running request shares stays where it is. The tree is asked,
    by giving the lock up and taking it again.
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
    """Host memory that the KV of one token takes, on this rank."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    size = pool.get_kv_size_bytes()
    return int(-(-(sum(size) if isinstance(size, tuple) else size) // pool.size))


def swap_out(scheduler: Scheduler, running_batch: Batch, req: Req) -> bool:
    """Copy a running request's KV to host memory and take it off the device; False, and nothing is
    changed, where the copy fails, on whichever rank.

    A token whose forward pass is in flight is dropped with its KV (SGLang skips results of
    retracted requests), and computed again after swap_in.
    """
    try:
        backup_kv_cache(
            req,
            scheduler.tree_cache,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            _BACKEND,
        )
        copied = True
    except (RuntimeError, MemoryError):
        logger.exception("a request's KV could not be copied to host memory; it goes on running")
        copied = False
    if not least(scheduler, copied):  # on whichever rank
        drop(scheduler, req)
        return False
    running_batch.release_req(running_batch.reqs.index(req), len(running_batch.reqs) - 1)
    _leave(running_batch, req)
    return True


def leave_in_tree(scheduler: Scheduler, running_batch: Batch, req: Req) -> None:
    """Take a running request off the device, its KV left in the radix tree as long as nobody needs
    the memory. Back in the queue it is prefilled like any other, from what the tree still has."""
    release_kv_cache(req, scheduler.tree_cache, checkpoint=True)
    req.reset_for_retract()
    _leave(running_batch, req)


def _leave(running_batch: Batch, req: Req) -> None:
    others = [i for i, other in enumerate(running_batch.reqs) if other is not req]
    running_batch.filter_batch(keep_indices=others)
    req.time_stats.set_wait_queue_entry_time()


def drop(scheduler: Scheduler, req: Req) -> None:
    """Forget the copy. A waiting request is then computed again, as after any retraction."""
    discard_kv_cache_backup(req, scheduler.tree_cache, _BACKEND)


class Return(Enum):
    """What became of a request that was to come back."""

    BACK = auto()
    # The copy could not be written, on some rank; it is gone, and the request is computed again.
    LOST = auto()
    # There is no room on the device. The copy is kept.
    NO_ROOM = auto()


def swap_in(scheduler: Scheduler, reqs: Sequence[Req]) -> tuple[Batch | None, list[Return]]:
    """Bring requests back: the batch to merge into the running one (None if there is nobody in
    it), and what became of each. Behind one that has no room nobody is brought back either.

    None of them may have been swapped out since the last step was launched: a result that is still
    in flight would count as theirs.
    """
    if scheduler.enable_overlap and scheduler.device != "cpu":
        # A pass in flight may still write to slots that were given away.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
    outcomes: list[Return] = []
    for req in reqs:
        if Return.NO_ROOM in outcomes:
            outcomes.append(Return.NO_ROOM)
        else:
            outcomes.append(_restored(scheduler, req))
    back = [req for req, outcome in zip(reqs, outcomes, strict=True) if outcome is Return.BACK]
    if not back:
        return None, outcomes
    counting = [req for req in back if counts_tokens(req)]
    plain = [req for req in back if req not in counting]
    first, *others = [
        _prebuilt(scheduler, group) for group in (plain, *([req] for req in counting)) if group
    ]
    for batch in others:
        first.merge_batch(batch)
    return first, outcomes


def counts_tokens(req: Req) -> bool:
    """Whether its penalties or min_new_tokens depend on what was said before. Prefilled again, it
    would start anew."""
    sampling = req.sampling_params
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.min_new_tokens
    )


def _prebuilt(scheduler: Scheduler, reqs: list[Req]) -> Any:
    """A batch without a forward pass, as SGLang's decode side makes of KV that came over the
    network. One that counts tokens has to be alone.

    Penalties and min_new_tokens count in the batch, anew in each: so what was said is counted
    again, all but the newest token, which the next step counts. Without overlap that is the count
    that would have been. With overlap SGLang's own is a token behind and skips or repeats one where
    a prefill comes between, so that penalized answers depend on who else is served even so.
    """
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
    # A request's grammar has accepted what was said. process_prebuilt would have it accept the
    # newest token once more, unless the backend's grammar remembers it, as only some do.
    grammars = [req.grammar for req in reqs]
    for req in reqs:
        req.grammar = None
    try:
        batch.process_prebuilt(scheduler.future_map)
    finally:
        for req, grammar in zip(reqs, grammars, strict=True):
            req.grammar = grammar
    counts = batch.sampling_info.penalizer_orchestrator
    if counts.is_required:
        said = torch.tensor(reqs[0].output_ids[:-1], dtype=torch.int64, device=batch.device)
        for token in said.unsqueeze(1):
            counts.cumulate_output_tokens(token)
    return batch


def _restored(scheduler: Scheduler, req: Req) -> Return:
    num_tokens = req.seqlen - 1  # the newest token has no KV yet
    # On all ranks or on none: their pools are alike.
    if not _given_room(scheduler, req, num_tokens):
        return Return.NO_ROOM
    pool, allocator = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    req.kv.kv_committed_len = num_tokens
    req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
    req.prefix_len, req.extend_end = 0, num_tokens
    try:
        restore_kv_cache(req, scheduler.tree_cache, pool, allocator, _BACKEND)
        restored = True
    except (RuntimeError, MemoryError):
        logger.exception("a request's KV could not be copied back; it is computed again")
        restored = False
    if not least(scheduler, restored):  # on whichever rank
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
        req.reset_for_retract()
        drop(scheduler, req)
        return Return.LOST
    req.time_stats.set_forward_entry_time()
    return Return.BACK


def _given_room(scheduler: Scheduler, req: Req, num_tokens: int) -> bool:
    """Give a swapped request a row and slots for its KV; False, and it has none, if there is no
    room for them. Room is looked for first, as a failed allocation would leave traces."""
    pool, allocator = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    num_paged = -(-num_tokens // scheduler.page_size) * scheduler.page_size
    evict_from_tree_cache(scheduler.tree_cache, num_paged)
    if allocator.available_size() < num_paged or pool.available_size() < 1:
        return False
    pool.alloc([req])
    slots = alloc_for_decode_prealloc(
        allocator,
        req=req,
        fill_len=num_tokens,
        delta_len=num_tokens,
        prefix_len=0,
        total_prefix_len=0,
        prefix_indices=None,
        uses_swa_tail=False,
        swa_tail_len=0,
        req_to_token_pool=pool,
    )
    pool.write((req.kv.req_pool_idx, slice(0, num_tokens)), slots.to(torch.int32))
    return True
