"""Finds the items that have come and gone in a long queue since the last pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, filterfalse
from typing import Generic, TypeVar

Item = TypeVar("Item")

# A plan orders at most this many jobs. The others stay behind them in their present order. Few jobs
# enter a full batch.
HEAD, HEAD_IF_FULL = 256, 64


class Followed(Generic[Item]):
    """Remembers a long list between two looks. Its unchanged part is compared as a whole."""

    def __init__(self) -> None:
        self._left: list[Item] = []

    def look(self, items: Sequence[Item]) -> tuple[list[Item], list[Item], int, int]:
        """Return the items that have gone and come since the last look, and the start and end of
        the unchanged part: all, or the items that were behind the first HEAD ones at the last look,
        if they are still in a row."""
        if self._left == items:
            return [], [], 0, len(items)
        left, self._left = self._left, [*items]
        start = end = len(items)
        if len(left) > HEAD and left[HEAD] in self._left[: 2 * HEAD]:
            first = self._left.index(left[HEAD])
            if self._left[first : first + len(left) - HEAD] == left[HEAD:]:
                start, end = first, first + len(left) - HEAD
        old = left[: len(left) - (end - start)]
        new = [*self._left[:start], *self._left[end:]]
        before, now = set(old), set(new)
        gone, came = filterfalse(now.__contains__, old), filterfalse(before.__contains__, new)
        return [*gone], [*came], start, end

    def ordered(self, order: Sequence[int]) -> None:
        """Note that the list was put in an order."""
        self._left = in_front(self._left, order)


def in_front(items: Sequence[Item], order: Sequence[int]) -> list[Item]:
    """Return the items at these positions, then all others as they are."""
    if [*order] == [*range(len(order))]:
        return [*items]
    rest: list[Item] = []
    start = 0
    for position in sorted(order):
        if position > start:
            rest += items[start:position]
        start = position + 1
    return [*map(items.__getitem__, order), *rest, *items[start:]]


class Positions(dict[Item, int]):
    """Finds the positions of items. Most lookups are for the first or the last items of the
    queue."""

    def __init__(self, queue: Sequence[Item]) -> None:
        self._queue = queue
        super().__init__(zip(queue[: 2 * HEAD], count(), strict=False))
        num_before = max(0, len(queue) - HEAD)
        self.update(zip(queue[num_before:], count(num_before), strict=False))

    def __missing__(self, item: Item) -> int:
        queue, self._queue = self._queue, ()
        self.update(zip(queue, count(), strict=False))
        if item not in self:
            raise KeyError(item)
        return self[item]
