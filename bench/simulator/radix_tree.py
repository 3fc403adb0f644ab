"""Models SGLang's radix tree, which decides which KV the pool keeps and which is evicted next.

It follows mem_cache/unified_radix_cache.py of 0.5.23, with the host memory of its hierarchical
cache. A token is identified by its stream and its place there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

# Some tokens of a stream: (stream, first, end). In all sequences, the same tokens precede a stream.
Span = tuple[int, int, int]


class TreeNode:
    """Some tokens of one stream, behind the tokens of the parent.

    num_locks: requests that hold it.
    last_use: the number of the match that used it last.
    on_device, on_host: where its KV is, in one of them or in both. If it is on the device, so are
        all nodes above it.
    session: the session that used it last, if it is in that session's latest sequence; else "".
    """

    __slots__ = (
        "children", "end", "first", "last_use", "num_locks", "on_device", "on_host", "parent",
        "session", "stream",
    )  # fmt: skip

    def __init__(self, span: Span, parent: TreeNode | None, last_use: int) -> None:
        self.stream, self.first, self.end = span
        self.parent = parent
        self.children: dict[tuple[int, int], TreeNode] = {}
        self.num_locks = 0
        self.last_use = last_use
        self.on_device, self.on_host = True, False
        self.session = ""

    def __len__(self) -> int:
        """Return the number of its own tokens."""
        return self.end - self.first

    def path(self) -> Iterator[TreeNode]:
        """Iterate from this node up to the last below the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory for KV that the device evicts (--enable-hierarchical-cache).

    num_tokens: its size.
    writes_back: whether KV is copied when the device evicts it, while the device waits. If not, KV
        is copied as soon as it is computed, while other work goes on (--hicache-write-policy).
    """

    num_tokens: int
    writes_back: bool = False


class RadixTree:
    """Sequences that share their prefixes. All lengths are in whole pages.

    locked_tokens, evictable_tokens: on the device, in nodes that some request holds, and in the
        others.
    host_tokens: in host memory.
    waited_tokens: copied between device and host memory while the device waited.
    rate: the rate at which a session returns (sage_sched.session_returns), by which KV is evicted,
        the smallest first; None to evict by the last use alone.
    """

    def __init__(self, page_size: int, host: HostTier | None = None) -> None:
        self.root = TreeNode((0, 0, 0), None, 0)
        self.locked_tokens = 0
        self.evictable_tokens = 0
        self.host_tokens = 0
        self.waited_tokens = 0
        self._page = page_size
        self.rate: Callable[[str], float] | None = None
        self._host = host
        self._num_uses = 0
        # The end of each session's latest sequence.
        self._latest: dict[str, TreeNode] = {}
        self._leaves: list[tuple[float, int, int, TreeNode]] = []
        self._host_leaves: list[tuple[float, int, int, TreeNode]] = []
        self._num_pushed = 0

    def match(self, sequence: Sequence[Span]) -> tuple[TreeNode, int]:
        """Return the node at which the known prefix of a sequence ends, and its length. Matched
        nodes are evicted last from now on."""
        self._num_uses += 1
        node, num_tokens = self.root, 0
        for stream, first, end in _in_pages(sequence, self._page):
            while first < end:
                child = node.children.get((stream, first))
                if child is None:
                    return self._matched(node, num_tokens)
                common = min(end, child.end) - first
                whole = common if common == len(child) else common // self._page * self._page
                if whole < len(child):
                    return self._matched(*self._part(node, child, whole, num_tokens))
                child.last_use = self._num_uses
                node, num_tokens, first = child, num_tokens + whole, first + whole
        return self._matched(node, num_tokens)

    def insert(self, sequence: Sequence[Span], session: str = "") -> TreeNode:
        """Put a sequence on the device, except a partial page at its end, and return its last node.
        The new part is evictable."""
        node, num_tokens = self.match(sequence)
        self._put_on_device(node)
        for stream, first, end in _behind(_in_pages(sequence, self._page), num_tokens):
            child = TreeNode((stream, first, end), node, self._num_uses)
            node.children[stream, first] = child
            self.evictable_tokens += len(child)
            node = child
        self._mark(node, session)
        self._note(node)
        if self._host is not None and not self._host.writes_back:
            for each in reversed([*node.path()]):
                if not self._write(each):
                    break
        return node

    def _mark(self, node: TreeNode, session: str) -> None:
        """Assign a path that was just matched to a session. The branch that the session left loses
        its owner."""
        for each in node.path():
            each.session = session
        if session:
            left = self._latest.get(session, node)
            self._latest[session] = node
            for each in left.path():
                if each.last_use == self._num_uses:
                    break
                if each.session == session:
                    each.session = ""

    def load(self, node: TreeNode) -> None:
        """Copy a node and all above it to the device, which waits for the copy."""
        self.waited_tokens += self._put_on_device(node)

    def take_waited(self) -> int:
        """Return how many tokens the device has waited for since the last call."""
        num_tokens, self.waited_tokens = self.waited_tokens, 0
        return num_tokens

    def lock(self, node: TreeNode) -> None:
        """Lock a node and all above it for a request."""
        for each in node.path():
            if each.num_locks == 0:
                self.evictable_tokens -= len(each)
                self.locked_tokens += len(each)
            each.num_locks += 1

    def unlock(self, node: TreeNode) -> None:
        """Release a request's lock of a node and all above it."""
        for each in node.path():
            each.num_locks -= 1
            if each.num_locks == 0:
                self.locked_tokens -= len(each)
                self.evictable_tokens += len(each)
        self._note(node)

    def evict(self, num_tokens: int) -> None:
        """Evict whole leaves until num_tokens are free or none is left: first the least valuable,
        then the least recently used."""
        if num_tokens > 0 and self.rate is not None:
            noted = {id(node): node for *_, node in (*self._leaves, *self._host_leaves)}
            self._leaves.clear()
            self._host_leaves.clear()
            for node in noted.values():
                self._note(node)
        while num_tokens > 0 and self._leaves:
            _, last_use, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or not self._is_evictable(node) or node.last_use != last_use:
                continue  # removed, locked, or used since it was noted
            if self._host is not None and not node.on_host and self._host.writes_back:
                self.waited_tokens += len(node) if self._write(node) else 0
            node.on_device = False
            self.evictable_tokens -= len(node)
            num_tokens -= len(node)
            self._note(parent)
            if node.on_host:
                self._note_host(node)
            else:
                self._forget_all(node)

    def kept_for(self) -> Counter[str]:
        """Return the evictable tokens by the session that used them last."""
        kept = Counter[str]()
        for node in self.nodes():
            if node.on_device and not node.num_locks:
                kept[node.session] += len(node)
        return kept

    def nodes(self) -> Iterator[TreeNode]:
        """Iterate over all nodes below the root."""
        waiting = [*self.root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _put_on_device(self, node: TreeNode) -> int:
        """Put a path on the device, evictable; return the tokens that were not there."""
        absent = [each for each in node.path() if not each.on_device]
        for each in absent:
            each.on_device = True
        num_tokens = sum(map(len, absent))
        self.evictable_tokens += num_tokens
        return num_tokens

    def _write(self, node: TreeNode) -> bool:
        """Copy a node to host memory, and return whether it had room."""
        assert self._host is not None
        if not node.on_host:
            if not self._make_host_room(len(node)):
                return False
            node.on_host = True
            self.host_tokens += len(node)
        return True

    def _make_host_room(self, num_tokens: int) -> bool:
        """Evict leaves that are in host memory only, in the order of evict()."""
        assert self._host is not None
        while self.host_tokens + num_tokens > self._host.num_tokens and self._host_leaves:
            _, last_use, _, node = heapq.heappop(self._host_leaves)
            if node.parent is None or node.on_device or node.children or node.last_use != last_use:
                continue
            self.host_tokens -= len(node)
            self._forget(node)
        return self.host_tokens + num_tokens <= self._host.num_tokens

    def _forget_all(self, node: TreeNode) -> None:
        """Remove a node whose KV is nowhere any more, with the nodes behind it in host memory."""
        for child in [*node.children.values()]:
            self.host_tokens -= len(child)
            self._forget_all(child)
        self._forget(node)

    def _forget(self, node: TreeNode) -> None:
        """Remove a leaf whose KV is nowhere any more."""
        assert node.parent is not None
        parent, node.parent = node.parent, None
        del parent.children[node.stream, node.first]
        if self._latest.get(node.session) is node:
            self._latest[node.session] = parent
        if parent.parent is not None and not parent.on_device:
            self._note_host(parent)

    def _matched(self, node: TreeNode, num_tokens: int) -> tuple[TreeNode, int]:
        for each in node.path():
            self._note(each)
            if each.on_device:
                break
        return node, num_tokens

    def _part(
        self, node: TreeNode, child: TreeNode, num_tokens: int, before: int
    ) -> tuple[TreeNode, int]:
        """Split a child at the end of its matching tokens, and return the first part."""
        if num_tokens == 0:
            return node, before
        middle = child.first + num_tokens
        upper = TreeNode((child.stream, child.first, middle), node, self._num_uses)
        upper.num_locks = child.num_locks
        upper.on_device, upper.on_host = child.on_device, child.on_host
        upper.session = child.session
        upper.children[child.stream, middle] = child
        node.children[child.stream, child.first] = upper
        child.first, child.parent = middle, upper
        return upper, before + num_tokens

    def _note(self, node: TreeNode) -> None:
        """Add a node to the candidates for eviction."""
        if node.parent is None:
            return
        if self._is_evictable(node):
            heapq.heappush(self._leaves, self._entry(node))
        elif not node.on_device:
            self._note_host(node)

    def _note_host(self, node: TreeNode) -> None:
        """Add a node to the candidates for eviction from host memory."""
        if not node.children:
            heapq.heappush(self._host_leaves, self._entry(node))

    def _entry(self, node: TreeNode) -> tuple[float, int, int, TreeNode]:
        """Return a heap entry; the node evicted first sorts first."""
        self._num_pushed += 1
        rate = 0.0 if self.rate is None else self.rate(node.session)
        return rate, node.last_use, self._num_pushed, node

    def _is_evictable(self, node: TreeNode) -> bool:
        if node.num_locks or not node.on_device:
            return False
        return not any(child.on_device for child in node.children.values())


def cut(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    """Return the first tokens of a sequence."""
    kept: list[Span] = []
    for stream, first, end in spans:
        if num_tokens <= 0:
            break
        kept.append((stream, first, min(end, first + num_tokens)))
        num_tokens -= end - first
    return kept


def common_tokens(one: Sequence[Span], two: Sequence[Span]) -> int:
    """Return the length of the common prefix of two sequences."""
    num_tokens = 0
    for (stream, first, end), (other_stream, other_first, other_end) in zip(one, two, strict=False):
        if (stream, first) != (other_stream, other_first):
            break
        num_tokens += min(end, other_end) - first
        if end != other_end:
            break
    return num_tokens


def _in_pages(sequence: Sequence[Span], page_size: int) -> Iterator[Span]:
    """Return the sequence in spans of whole pages. A page with tokens of two streams belongs to the
    second stream, because the same tokens always precede its own."""
    rest = 0
    for stream, first, end in sequence:
        whole = (end - first + rest) // page_size * page_size
        if whole:
            yield stream, first - rest, first - rest + whole
        rest += end - first - whole


def _behind(spans: Iterable[Span], num_tokens: int) -> Iterator[Span]:
    """Return all but the first tokens of a sequence."""
    for stream, first, end in spans:
        skipped = min(num_tokens, end - first)
        num_tokens -= skipped
        if first + skipped < end:
            yield stream, first + skipped, end
