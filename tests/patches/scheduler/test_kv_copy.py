from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from patches.scheduler import kv_copy
from tests.patches.schedulers import Server, make_request, make_tree


def _insert(tree: Any) -> torch.Tensor:
    """Put the first three tokens of the prompt into the tree, and return their slots."""
    slots: torch.Tensor = tree.token_to_kv_pool_allocator.alloc(3)
    tree.insert(InsertParams(key=RadixKey(array("q", [1] * 3)), value=slots))
    return slots


def _swapped_out(tree: Any) -> tuple[Server, Any]:
    """Return a server, and a request that left when three of its tokens were in the tree. The
    newest of its 13 tokens has no KV yet."""
    server = Server(
        tree_cache=tree, req_to_token_pool=tree.req_to_token_pool,
        token_to_kv_pool_allocator=tree.token_to_kv_pool_allocator, enable_overlap=False,
    )  # fmt: skip
    (req,) = server.arrive(make_request([9], 10, answer_tokens=3))
    found = kv_copy.match_kv_cache(req, tree)
    (path,) = tree.tree_core.collect_path_info([found.last_device_node])
    req.sage.shared_nodes = {node.node_id: node.path_end for node in path}
    return server, req


@pytest.mark.parametrize(
    ("free_rows", "free_tokens", "comes_back"), [(1, 9, True), (0, 9, False), (1, 8, False)]
)
def test_a_request_comes_back_if_it_finds_a_row_and_a_slot_for_each_token(
    free_rows: int, free_tokens: int, comes_back: bool
) -> None:
    tree: Any = make_tree()
    rows, slots = tree.req_to_token_pool, tree.token_to_kv_pool_allocator
    shared = _insert(tree)
    rows.alloc([make_request() for _ in range(rows.available_size() - free_rows)])
    slots.alloc(slots.available_size() - free_tokens)
    server, req = _swapped_out(tree)
    assert kv_copy.take_room(server.scheduler, req, []) == comes_back
    if comes_back:
        row = rows.req_to_token[req.kv.req_pool_idx]
        assert row[:3].tolist() == shared.tolist()
        assert len({*row[:12].tolist()}) == 12
    free = (rows.available_size(), slots.available_size())
    assert free == ((0, 0) if comes_back else (free_rows, free_tokens))
    assert (req.lock is None, tree.evictable_size()) == ((False, 0) if comes_back else (True, 3))


def test_kv_that_was_evicted_and_computed_again_is_not_its_own() -> None:
    tree: Any = make_tree()
    _insert(tree)
    server, req = _swapped_out(tree)
    tree.evict(EvictParams(num_tokens=3))
    again = _insert(tree)
    assert kv_copy.take_room(server.scheduler, req, [])
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :12]
    assert not {*again.tolist()} & {*row.tolist()}
    assert req.lock is None
