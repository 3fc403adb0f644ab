"""KV that a preempted request frees, by the locks of SGLang's radix tree."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from patches.scheduler.kv_copy import _locked_again, freed_tokens

NUM_SHARED, NUM_SAID = 40, 7


def running(tree: RadixCache, question: int) -> Any:
    """A request whose prompt is a document and a question to it, of one token. The tree has it,
    locked by the request; of its answer NUM_SAID tokens have KV."""
    ids = array("q", [*range(NUM_SHARED), 1000 + question])
    tree.insert(InsertParams(key=RadixKey(ids), value=torch.arange(len(ids))))
    match = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
    return SimpleNamespace(
        lock=tree.lock(match.last_device_node),
        kv=SimpleNamespace(kv_allocated_len=len(ids) + NUM_SAID, cache_protected_len=len(ids)),
    )


def test_a_shared_prompt_is_freed_by_the_last_that_reads_it() -> None:
    tree = RadixCache.create_simulated()
    scheduler = SimpleNamespace(tree_cache=tree)
    one, other = running(tree, 1), running(tree, 2)
    for _ in range(2):  # to ask changes nothing
        assert freed_tokens(scheduler, one) == NUM_SAID + 1
        assert freed_tokens(scheduler, other) == NUM_SAID + 1
    assert tree.evictable_size() == 0
    tree.unlock(other.lock)
    assert freed_tokens(scheduler, one) == NUM_SAID + 1 + NUM_SHARED
    assert tree.evictable_size() == 1


def test_without_a_radix_tree_it_is_all_that_the_request_holds() -> None:
    kv = SimpleNamespace(kv_allocated_len=50, cache_protected_len=0)
    assert freed_tokens(SimpleNamespace(), SimpleNamespace(lock=None, kv=kv)) == 50


def away(tree: RadixCache, num_left: int) -> Any:
    """A swapped request, whose first tokens the tree had in the slots from 0 on."""
    return SimpleNamespace(
        origin_input_ids=array("q", range(NUM_SHARED)),
        output_ids=array("q", [1000]),
        sage=SimpleNamespace(shared_slots=torch.arange(num_left, dtype=torch.int32)),
        extra_key=None,
        cache_salt=None,
        lock=None,
        _compute_max_prefix_len=lambda num_tokens: num_tokens,
    )


def test_who_comes_back_shares_what_the_tree_has_kept_for_others() -> None:
    tree = RadixCache.create_simulated()
    scheduler = SimpleNamespace(tree_cache=tree, page_size=1)
    others, back = running(tree, 1), away(tree, NUM_SHARED)
    assert _locked_again(scheduler, back).tolist() == [*range(NUM_SHARED)]
    tree.unlock(others.lock)
    # Shared KV stays after the other request has gone.
    assert tree.evictable_size() == 1
    tree.unlock(back.lock)
    # No more than it left, and whole pages of it.
    scheduler.page_size = 16
    short = away(tree, 35)
    assert len(_locked_again(scheduler, short)) == 32
    tree.unlock(short.lock)


def test_kv_that_was_computed_anew_is_not_its_own() -> None:
    tree = RadixCache.create_simulated()
    scheduler = SimpleNamespace(tree_cache=tree, page_size=1)
    ids = array("q", range(NUM_SHARED))
    slots = torch.arange(NUM_SHARED)
    slots[10:] += 500
    tree.insert(InsertParams(key=RadixKey(ids), value=slots))
    assert len(_locked_again(scheduler, away(tree, NUM_SHARED))) == 10
    nothing = away(tree, 0)
    assert len(_locked_again(scheduler, nothing)) == 0
    assert nothing.lock is None
