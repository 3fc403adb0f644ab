"""Models the KV pool: pages that requests hold alone, and the radix tree that they share."""

from __future__ import annotations

from dataclasses import dataclass

from bench.simulator.radix_tree import HostTier, RadixTree, TreeNode, cut
from bench.simulator.request import Progress


class OutOfMemoryError(RuntimeError):
    """A chunked prompt has no room for its next chunk: an SGLang server would crash.

    at_s: the simulated time; simulate sets it.
    """

    at_s = 0.0


@dataclass(frozen=True, slots=True)
class Cached:
    """The cached part of a sequence: the node at which it ends, its length, and how much of it is
    evictable, or in host memory only."""

    node: TreeNode
    num_tokens: int
    evictable_tokens: int
    host_tokens: int

    @property
    def locked_tokens(self) -> int:
        """The part that other requests hold on the device."""
        return self.num_tokens - self.evictable_tokens - self.host_tokens


class KvPool:
    """Pages of KV: held, evictable, or free. Holding more pages than are free evicts the rest.

    A request holds pages alone as it computes them. Its computed prefix goes to the tree after each
    step, as in SGLang. If two requests have computed the same prefix, one returns its pages.
    """

    def __init__(self, num_tokens: int, page_size: int, host: HostTier | None = None) -> None:
        self.page_size = page_size
        self.num_pages = num_tokens // page_size
        self.tree = RadixTree(page_size, host)
        # With a hierarchical cache a returning request brings back all of its KV, and shares none.
        self._shares_again = host is None
        self.alone_pages = 0

    @property
    def held_pages(self) -> int:
        """The pages held by requests on the device."""
        return self.alone_pages + self.tree.locked_tokens // self.page_size

    @property
    def evictable_pages(self) -> int:
        return self.tree.evictable_tokens // self.page_size

    @property
    def room_pages(self) -> int:
        """The free and the evictable pages."""
        return self.num_pages - self.held_pages

    @property
    def room_tokens(self) -> int:
        return self.room_pages * self.page_size

    def pages(self, num_tokens: int) -> int:
        """Return the number of pages that hold num_tokens tokens."""
        return -(-num_tokens // self.page_size)

    def hold(self, num_pages: int) -> None:
        """Take pages. Raises OutOfMemoryError if there are too few, as SGLang does."""
        if num_pages > self.room_pages:
            raise OutOfMemoryError(
                f"out of KV memory: {num_pages} pages are needed, {self.room_pages} are left"
            )
        self.alone_pages += num_pages
        self.free_at_least(0)

    def free_at_least(self, num_tokens: int) -> None:
        """Evict until num_tokens are free or nothing is left to evict."""
        free_pages = self.room_pages - self.evictable_pages
        self.tree.evict((self.pages(num_tokens) - free_pages) * self.page_size)

    def found_tokens(self, progress: Progress) -> int:
        """Return the length of a waiting request's cached prefix. Its last token never counts."""
        return self._match(progress)[1]

    def host_tokens(self, progress: Progress) -> int:
        """Return how many tokens of a waiting request's cached prefix are in host memory only."""
        return self.cached(progress).host_tokens if self.tree.host_tokens else 0

    def cached(self, progress: Progress) -> Cached:
        """Return the cached prefix of a waiting request, and where it is."""
        node, num_tokens = self._match(progress)
        on_device = [each for each in node.path() if each.on_device]
        evictable_tokens = sum(len(each) for each in on_device if not each.num_locks)
        return Cached(node, num_tokens, evictable_tokens, num_tokens - sum(map(len, on_device)))

    def enter(self, progress: Progress, cached: Cached) -> None:
        """Hold on the device the cached prefix of a request that is about to be prefilled."""
        progress.node, progress.tree_tokens = cached.node, cached.num_tokens
        self.tree.load(cached.node)
        self.tree.lock(cached.node)
        self.free_at_least(0)

    def shared_tokens(self, progress: Progress) -> int:
        """Return how many tokens of a waiting request's cached prefix other requests hold on the
        device."""
        if progress.swapped and not self._shares_again:
            return 0
        return self.cached(progress).locked_tokens

    def alone_tokens(self, progress: Progress) -> int:
        """Return the tokens that become free or evictable when a running request leaves."""
        num_tokens = self.pages(progress.kv_tokens - progress.tree_tokens) * self.page_size
        path = () if progress.node is None else progress.node.path()
        return num_tokens + sum(len(node) for node in path if node.num_locks == 1)

    def take_back(self, progress: Progress) -> bool:
        """Hold all of the KV of a swapped-out request: its cached prefix in the tree, and the rest
        alone.

        Return False if there is no room.
        """
        cached = self.cached(progress) if self._shares_again else Cached(self.tree.root, 0, 0, 0)
        num_pages = self.pages(progress.kv_tokens - cached.num_tokens)
        if num_pages + cached.evictable_tokens // self.page_size > self.room_pages:
            return False
        if cached.num_tokens:
            self.enter(progress, cached)
        self.hold(num_pages)
        return True

    def publish(self, progress: Progress, num_tokens: int) -> None:
        """Put the first num_tokens tokens of a sequence, which are computed, into the tree."""
        whole = num_tokens // self.page_size * self.page_size
        session = progress.request.hints.session
        node = self.tree.insert(cut(progress.sequence(), num_tokens), session)
        self.tree.lock(node)
        if progress.node is not None:
            self.tree.unlock(progress.node)
        self.alone_pages -= (whole - progress.tree_tokens) // self.page_size
        progress.node, progress.tree_tokens = node, whole

    def leave(self, progress: Progress) -> None:
        """Take a request off the device; its part of the tree stays until it is evicted."""
        self.alone_pages -= self.pages(progress.kv_tokens - progress.tree_tokens)
        if progress.node is not None:
            self.tree.unlock(progress.node)
        progress.node, progress.tree_tokens = None, 0

    def _match(self, progress: Progress) -> tuple[TreeNode, int]:
        return self.tree.match(cut(progress.sequence(), progress.fill_tokens - 1))
