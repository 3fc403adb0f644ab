"""SGLang's radix tree: which beginnings of sequences the KV pool keeps, and who is evicted next.

After mem_cache/radix_cache.py of 0.5.23. A token is known by its stream and its place in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

# So many tokens of a stream: (stream, first, end). Before a stream's tokens there are always the
# same others.
Span = tuple[int, int, int]


class TreeNode:
    """Some tokens of one stream, behind those of the parent.

    num_locks: requests that hold it. last_use: when it was matched last, a count.
    """

    __slots__ = ("children", "end", "first", "last_use", "num_locks", "parent", "stream")

    def __init__(self, span: Span, parent: TreeNode | None, last_use: int) -> None:
        self.stream, self.first, self.end = span
        self.parent = parent
        self.children: dict[tuple[int, int], TreeNode] = {}
        self.num_locks = 0
        self.last_use = last_use

    def __len__(self) -> int:
        """Tokens of its own."""
        return self.end - self.first

    def path(self) -> Iterator[TreeNode]:
        """From this node up to the last below the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree:
    """Sequences that share their beginnings; all lengths in whole pages.

    locked_tokens, evictable_tokens: in nodes that some request holds, and in the others.
    """

    def __init__(self, page_size: int) -> None:
        self.root = TreeNode((0, 0, 0), None, 0)
        self.locked_tokens = 0
        self.evictable_tokens = 0
        self._page = page_size
        self._num_uses = 0
        self._leaves: list[tuple[int, int, TreeNode]] = []
        self._num_pushed = 0

    def match(self, sequence: Sequence[Span]) -> tuple[TreeNode, int]:
        """The node at which the known beginning of a sequence ends, and how long that is. What is
        matched is evicted last from now on."""
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

    def insert(self, sequence: Sequence[Span]) -> TreeNode:
        """Have a sequence in the tree, all but a part of a page at its end; its last node. What was
        not there is evictable."""
        node, num_tokens = self.match(sequence)
        for stream, first, end in _behind(_in_pages(sequence, self._page), num_tokens):
            child = TreeNode((stream, first, end), node, self._num_uses)
            node.children[stream, first] = child
            self.evictable_tokens += len(child)
            node = child
        self._note(node)
        return node

    def lock(self, node: TreeNode) -> None:
        """A request holds a node and all above it."""
        for each in node.path():
            if each.num_locks == 0:
                self.evictable_tokens -= len(each)
                self.locked_tokens += len(each)
            each.num_locks += 1

    def unlock(self, node: TreeNode) -> None:
        """It does so no longer."""
        for each in node.path():
            each.num_locks -= 1
            if each.num_locks == 0:
                self.locked_tokens -= len(each)
                self.evictable_tokens += len(each)
        self._note(node)

    def evict(self, num_tokens: int) -> None:
        """Forget the leaves that were used longest ago, each as a whole, until so many tokens are
        given back or none is left."""
        while num_tokens > 0 and self._leaves:
            last_use, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or not self._is_evictable(node) or node.last_use != last_use:
                continue  # gone, held, or used since
            del parent.children[node.stream, node.first]
            node.parent = None
            self.evictable_tokens -= len(node)
            num_tokens -= len(node)
            self._note(parent)

    def nodes(self) -> Iterator[TreeNode]:
        """All below the root."""
        waiting = [*self.root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _matched(self, node: TreeNode, num_tokens: int) -> tuple[TreeNode, int]:
        self._note(node)
        return node, num_tokens

    def _part(
        self, node: TreeNode, child: TreeNode, num_tokens: int, before: int
    ) -> tuple[TreeNode, int]:
        """A child of which only the first tokens match is split there."""
        if num_tokens == 0:
            return node, before
        middle = child.first + num_tokens
        upper = TreeNode((child.stream, child.first, middle), node, self._num_uses)
        upper.num_locks = child.num_locks
        upper.children[child.stream, middle] = child
        node.children[child.stream, child.first] = upper
        child.first, child.parent = middle, upper
        return upper, before + num_tokens

    def _note(self, node: TreeNode) -> None:
        """It may be the next to be evicted."""
        if node.parent is not None and self._is_evictable(node):
            self._num_pushed += 1
            heapq.heappush(self._leaves, (node.last_use, self._num_pushed, node))

    def _is_evictable(self, node: TreeNode) -> bool:
        return node.num_locks == 0 and not node.children


def cut(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    """The first tokens of a sequence."""
    kept: list[Span] = []
    for stream, first, end in spans:
        if num_tokens <= 0:
            break
        kept.append((stream, first, min(end, first + num_tokens)))
        num_tokens -= end - first
    return kept


def common_tokens(one: Sequence[Span], two: Sequence[Span]) -> int:
    """How many tokens two sequences begin with alike."""
    num_tokens = 0
    for (stream, first, end), (other_stream, other_first, other_end) in zip(one, two, strict=False):
        if (stream, first) != (other_stream, other_first):
            break
        num_tokens += min(end, other_end) - first
        if end != other_end:
            break
    return num_tokens


def _in_pages(sequence: Sequence[Span], page_size: int) -> Iterator[Span]:
    """The same in spans of whole pages. A page that has tokens of two streams counts to the second,
    whose tokens never stand behind others."""
    rest = 0
    for stream, first, end in sequence:
        whole = (end - first + rest) // page_size * page_size
        if whole:
            yield stream, first - rest, first - rest + whole
        rest += end - first - whole


def _behind(spans: Iterable[Span], num_tokens: int) -> Iterator[Span]:
    """All but the first tokens of a sequence."""
    for stream, first, end in spans:
        skipped = min(num_tokens, end - first)
        num_tokens -= skipped
        if first + skipped < end:
            yield stream, first + skipped, end
