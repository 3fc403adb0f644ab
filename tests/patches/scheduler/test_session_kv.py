from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from patches.scheduler import session_kv
from patches.scheduler.session_kv import SessionKv
from sage_sched.limits import Limits
from tests.patches.schedulers import make_tree


def test_sessions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    tree = make_tree()
    monkeypatch.setattr(session_kv, "_NUM_COUNTED", 4)
    no_returns = SimpleNamespace(core=SimpleNamespace(limits=Limits()))
    kept = SessionKv(SimpleNamespace(tree_cache=tree, sage=no_returns))
    locks: list[Any] = []
    for session in range(5):
        ids = array("q", [session, *range(100, 104 + session)])
        tree.insert(InsertParams(key=RadixKey(ids), value=torch.arange(len(ids))))
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        locks.append(tree.lock(found.last_device_node))
        kept.mark(SimpleNamespace(lock=locks[-1]), f"s{session}")
    kept.mark(SimpleNamespace(lock=locks[-1]), "s4")  # it comes again
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
