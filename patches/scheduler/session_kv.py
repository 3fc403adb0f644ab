"""Makes SGLang's radix tree evict first the KV of the sessions that will probably return last.

A session's latest sequence is marked on the tree's nodes. SGLang evicts leaves by a strategy's
priority, smallest first (mem_cache/evict_policy.py); our priority comes before the server's own.
SGLang's hierarchical cache uses the same strategy for host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import ref

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from patches.engine_types import Req, Scheduler
from sage_sched.session_returns import MOST_SESSIONS

# Sessions and nodes counted per pass.
_NUM_COUNTED = 500


class SessionKv:
    """Replaces a tree's eviction strategy, if it has one. Trap: SGLang's default tree, in Rust, has
    none (SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND)."""

    def __init__(self, scheduler: Scheduler) -> None:
        tree: Any = scheduler.tree_cache
        self._scheduler = scheduler
        self._core: Any = None
        # The nodes of each session's latest sequence, as weak references. The oldest sessions are
        # dropped.
        self._latest: dict[str, list[ref[Any]]] = {}
        self._kept: dict[str, int] = {}
        self._due: deque[str] = deque()  # sessions to count next
        core = tree.tree_core if type(tree) is UnifiedRadixCache else None
        if isinstance(core, UnifiedTreeCore) and tree.tree_components == (ComponentType.FULL,):
            self._core, self._theirs = core, core.eviction_strategy
            core.eviction_strategy = self

    @property
    def follows(self) -> bool:
        """Whether the tree evicts by this strategy."""
        return self._core is not None

    @property
    def forgets(self) -> bool:
        """Whether the tree evicts by this strategy, and evicted KV is lost."""
        return self.follows and self._scheduler.tree_cache.cache_controller is None

    def get_priority(self, node: Any) -> tuple[float, Any]:
        """Return a leaf's priority: the rate of its session's return, then the server's own
        priority."""
        sessions = self._scheduler.sage.core.limits.sessions
        session = getattr(node, "sage_session", "")
        theirs = self._theirs.get_priority(node)
        if sessions is None or not session:
            return 0.0, theirs
        return sessions.rate(session, self._scheduler.sage.core.now_s), theirs

    def mark(self, req: Req, session: str) -> None:
        """Mark a request's KV in the tree, up to the node that it locks, as its session's.

        KV of the session behind another prefix, such as an answer that the next prompt leaves out,
        loses its mark.
        """
        if not self.follows or req.lock is None:
            return
        path = [*self._path(self._core.node_by_id(req.lock.node))]
        for node in path:
            node.sage_session = session
        if session and path:
            here = {node.id for node in path}
            for left in self._latest.pop(session, ()):
                node = left()
                if node is None or node.id in here:
                    continue
                if getattr(node, "sage_session", "") == session:
                    node.sage_session = ""
            self._latest[session] = [ref(node) for node in path]
            if len(self._latest) > MOST_SESSIONS:
                oldest = next(iter(self._latest))
                del self._latest[oldest]
                self._kept.pop(oldest, None)

    def kept_for(self) -> dict[str, int]:
        """Return the evictable tokens by session.

        Each call counts some sessions again, in turn. The last count holds for the others. Every
        pass calls this, and scanning all nodes of a large tree takes tens of milliseconds.
        """
        self._due = self._due or deque(self._latest)
        num_left = _NUM_COUNTED
        while self._due and num_left > 0:
            session = self._due.popleft()
            nodes = self._latest.get(session, ())
            num_left -= 1 + len(nodes)  # evicted ones too: ranks may free them at different times
            own = [*filter(None, (_own_kv(node(), session) for node in nodes))]
            if own:
                self._kept[session] = sum(len(kv.value) for kv in own if not kv.lock_ref)
            else:
                self._latest.pop(session, None)
                self._kept.pop(session, None)
        return self._kept

    def _path(self, node: Any) -> Iterator[Any]:
        while node is not None and node is not self._core.root_node:
            yield node
            node = node.parent


def _own_kv(node: Any, session: str) -> Any:
    """Return a node's data if it is on the device and belongs to the session; else None."""
    if getattr(node, "sage_session", "") != session:
        return None
    data = node.component_data[ComponentType.FULL]
    return None if data.value is None else data
