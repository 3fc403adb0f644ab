"""The KV pool with SGLang's radix tree, whose prompts are all distinct here."""

from __future__ import annotations

from collections.abc import Iterator

from bench.simulator.request import Progress


class KvPool:
    """Pages that requests hold, and pages that stay evictable after them, oldest first.

    What is neither held nor evictable is free. Holding more evicts as much as there is no room
    for, whole sequences at a time. Of a finished request nobody asks again; of a retracted one the
    evictable tokens are found again, unless they were evicted.
    """

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_tokens // page_size
        self.held_pages = 0
        self.evictable_pages = 0
        self._entries: dict[int, tuple[int, Progress | None]] = {}
        self._next_entry = 0

    @property
    def room_pages(self) -> int:
        """Free or evictable."""
        return self.num_pages - self.held_pages

    @property
    def room_tokens(self) -> int:
        return self.room_pages * self.page_size

    def pages(self, num_tokens: int) -> int:
        """What so many tokens take."""
        return -(-num_tokens // self.page_size)

    def hold(self, num_pages: int) -> list[Progress]:
        """Take pages; the requests whose tokens this evicts. RuntimeError where there is no room,
        as in SGLang."""
        if num_pages > self.room_pages:
            raise RuntimeError(f"out of KV memory: {num_pages} pages of {self.room_pages}")
        self.held_pages += num_pages
        return self._evict(self.held_pages + self.evictable_pages - self.num_pages)

    def free_at_least(self, num_tokens: int) -> list[Progress]:
        """Evict until so many tokens are free or nothing is left to evict; whose they were."""
        free = self.room_pages - self.evictable_pages
        return self._evict(self.pages(num_tokens) - free)

    def _evict(self, num_pages: int) -> list[Progress]:
        owners = []
        while num_pages > 0 and self._entries:
            pages, owner = self._entries.pop(next(iter(self._entries)))
            self.evictable_pages -= pages
            num_pages -= pages
            if owner is not None:
                owner.tree_tokens = 0
                owner.cache_entry = -1
                owners.append(owner)
        return owners

    def release(self, num_pages: int, kept_tokens: int, owner: Progress | None) -> None:
        """Give pages back; of these kept_tokens, in full pages, stay as an evictable sequence.

        owner: the request that may ask for it again.
        """
        self.held_pages -= num_pages
        kept_pages = kept_tokens // self.page_size
        if kept_pages > 0:
            self._entries[self._next_entry] = (kept_pages, owner)
            self.evictable_pages += kept_pages
            if owner is not None:
                owner.cache_entry = self._next_entry
            self._next_entry += 1

    def hold_cached(self, owner: Progress) -> None:
        """Hold again what the tree still has of a request, if anything."""
        if owner.cache_entry >= 0:
            pages, _ = self._entries.pop(owner.cache_entry)
            owner.cache_entry = -1
            self.evictable_pages -= pages
            self.held_pages += pages

    def entries(self) -> Iterator[tuple[int, Progress | None]]:
        """The evictable sequences, the next to be evicted first."""
        return iter(self._entries.values())
