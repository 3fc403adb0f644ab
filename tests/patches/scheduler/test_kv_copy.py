from __future__ import annotations

from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from patches.scheduler import kv_copy
from tests.patches.schedulers import Server, make_request, make_tree


@pytest.mark.parametrize(
    ("free_rows", "free_tokens", "comes_back"), [(1, 9, True), (0, 9, False), (1, 8, False)]
)
def test_a_request_comes_back_if_it_finds_a_row_and_a_slot_for_each_token(
    monkeypatch: pytest.MonkeyPatch, free_rows: int, free_tokens: int, comes_back: bool
) -> None:
    monkeypatch.setattr(kv_copy, "restore_kv_cache", lambda *args: None)
    monkeypatch.setattr(kv_copy, "_prebuilt", lambda scheduler, reqs: reqs)
    tree: Any = make_tree()
    rows, slots = tree.req_to_token_pool, tree.token_to_kv_pool_allocator
    # The newest of its 13 tokens has no KV yet. The first three are in the tree.
    key = RadixKey(array("q", [1] * 3))
    tree.insert(InsertParams(key=key, value=(shared := slots.alloc(3))))
    rows.alloc([make_request() for _ in range(rows.available_size() - free_rows)])
    slots.alloc(slots.available_size() - free_tokens)
    server = Server(
        tree_cache=tree, req_to_token_pool=rows, token_to_kv_pool_allocator=slots,
        enable_overlap=False,
    )  # fmt: skip
    (req,) = server.arrive(make_request([9], 10, answer_tokens=3))
    req.kv.retraction_backup = object()
    req.sage.shared_slots = shared
    found = kv_copy.swap_in(server.scheduler, [req], [])
    assert found == (([req], []) if comes_back else (None, [req]))
    free = (rows.available_size(), slots.available_size())
    assert free == ((0, 0) if comes_back else (free_rows, free_tokens))
    assert (req.lock is None, tree.evictable_size()) == ((False, 0) if comes_back else (True, 3))
