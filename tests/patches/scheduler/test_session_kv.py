from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from patches.scheduler import session_kv
from patches.scheduler.session_kv import SessionKv
from sage_sched.limits import Limits


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> UnifiedRadixCache:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    pool = MHATokenToKVPool(64, 1, torch.float32, 1, 8, 1, "cpu", enable_memory_saver=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(4, 64, "cpu", False),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(64, torch.float32, "cpu", pool, False),
        page_size=1,
        tree_components=(ComponentType.FULL,),
    )
    return UnifiedRadixCache(params)


def test_sessions_are_counted(monkeypatch: pytest.MonkeyPatch, tree: UnifiedRadixCache) -> None:
    monkeypatch.setattr(session_kv, "_NUM_COUNTED", 4)
    no_returns = SimpleNamespace(limits=Limits())
    kept = SessionKv(SimpleNamespace(tree_cache=tree, sage=no_returns))
    locks: list[Any] = []
    for session in range(5):
        ids = array("q", [session, *range(100, 104 + session)])
        tree.insert(InsertParams(key=RadixKey(ids), value=torch.arange(len(ids))))
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        locks.append(tree.lock(found.last_device_node))
        kept.mark(SimpleNamespace(lock=locks[-1]), f"s{session}")
    for lock in locks[1:]:
        tree.unlock(lock)
    assert kept.kept_for() == {"s0": 0, "s1": 6}
    for _ in range(2):
        found = kept.kept_for()
    assert found == {"s0": 0, "s1": 6, "s2": 7, "s3": 8, "s4": 9}
    tree.unlock(locks[0])
    tree.evict(EvictParams(num_tokens=tree.evictable_size()))
    for _ in range(3):
        found = kept.kept_for()
    assert not found
