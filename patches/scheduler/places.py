"""Gives out places in a memory of segments."""

from __future__ import annotations

from bisect import insort


class Places:
    """The free parts of a memory, as (start, end) in order. No place spans two segments. Equal
    calls give equal places, so all ranks agree on them."""

    def __init__(self, size: int, segment: int) -> None:
        self._segment = segment
        self._free = [(at, min(at + segment, size)) for at in range(0, size, segment)]

    def take(self, sizes: list[int]) -> list[int] | None:
        """Take places of these sizes, each the first that is large enough. Return their starts, or
        None, and take nothing, if one has no place."""
        starts: list[int] = []
        for size in sizes:
            found = next((part for part in self._free if part[1] - part[0] >= size), None)
            if found is None:
                self.give_back(starts, sizes)
                return None
            start, end = found
            number = self._free.index(found)
            self._free[number : number + 1] = [(start + size, end)] if end - start > size else []
            starts.append(start)
        return starts

    def give_back(self, starts: list[int], sizes: list[int]) -> None:
        """Free places, and join them with free neighbours."""
        for start, size in zip(starts, sizes, strict=False):
            insort(self._free, (start, start + size))
        joined: list[tuple[int, int]] = []
        for first, end in self._free:
            if joined and joined[-1][1] == first and first % self._segment:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((first, end))
        self._free = joined
