"""Moves KV between the device and pinned host memory, during compute.

Host memory is pinned once, because pinning takes longer than a copy. KV on its way out is gathered
into a buffer on the device, which takes a few per cent of the bus's time. This is all that later
work waits for: then the slots may be used again. A stream of its own moves the buffer to the host.
KV on its way back goes the other way. The host waits for nothing; streams wait for events.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patches.scheduler.places import Places

# The device memory of the two buffers for KV on its way out and back.
_STAGING_BYTES = 2**28
# Trap: PyTorch pins the next power of two.
_SEGMENT_BYTES = 2**30


@dataclass(eq=False, slots=True, weakref_slot=True)
class Copy:
    """KV in host memory. starts: the places of its parts, in words. coming: the part of the buffer
    into which it is being fetched, or None."""

    starts: list[int]
    num_tokens: int
    coming: _Part | None = None


@dataclass(eq=False, slots=True)
class _Part:
    """A part of a buffer. event: its present use has ended, or its content is there."""

    start: int
    words: torch.Tensor
    event: Any = None
    is_used: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.words)


class _Buffer:
    """Device memory for KV on its way. Its parts are taken in turn."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        self._parts: list[_Part] = []
        self._next = 0

    def take(self, num_words: int, stream: Any) -> _Part | None:
        """Take a part for work on this stream, which waits until the part's last use has ended.
        Return None if a request's KV is still there."""
        start = self._next if self._next + num_words <= len(self._words) else 0
        part = _Part(start, self._words[start : start + num_words])
        if num_words > len(self._words):
            return None
        before = [other for other in self._parts if other.start < part.end > start < other.end]
        if any(other.is_used for other in before):
            return None
        for other in before:
            stream.wait_event(other.event)
            self._parts.remove(other)
        self._parts.append(part)
        self._next = part.end
        return part


class KvArena:
    """Pinned memory for the KV of one rank, and buffers for KV on its way.

    Its methods work on the present stream, which is SGLang's schedule stream: the forward pass that
    is launched next waits for all of it.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], num_tokens: int) -> None:
        """buffers: the K and V of all layers, each of shape (slots, ...). num_tokens: the size of
        the host memory. Raises RuntimeError or MemoryError if it cannot be had."""
        device = buffers[0].device
        self._module: Any = torch.get_device_module(device)
        self._beside = self._module.Stream()
        num_bytes = [math.prod(buffer.shape[1:]) * buffer.element_size() for buffer in buffers]
        word = torch.int64 if math.gcd(*num_bytes) % 8 == 0 else torch.uint8
        # Any KV, as integers.
        self._rows = [buffer.view(len(buffer), -1).view(word) for buffer in buffers]
        self._widths = [rows.shape[1] for rows in self._rows]
        self._token_words = sum(self._widths)
        self.num_tokens = num_tokens
        num_words, self._segment = num_tokens * self._token_words, _SEGMENT_BYTES // word.itemsize
        sizes = [
            min(self._segment, num_words - start) for start in range(0, num_words, self._segment)
        ]
        pins = device.type != "cpu"
        self._host = [torch.empty(size, dtype=word, pin_memory=pins) for size in sizes]
        self._places = Places(num_words, self._segment)
        # No part is larger than half of the buffer, so that the next KV is gathered while it moves.
        most_tokens = min(num_tokens, len(buffers[0]))
        staged_tokens = _STAGING_BYTES // 4 // (word.itemsize * self._token_words)
        self._part_tokens = max(1, min(staged_tokens, most_tokens))
        num_words = 2 * self._part_tokens * self._token_words
        self._out, self._back = (
            _Buffer(torch.empty(num_words, dtype=word, device=device)) for _ in range(2)
        )

    def copy_out(self, slots: torch.Tensor) -> Copy | None:
        """Copy the KV of these slots to host memory. Return None if it has no place. Later work on
        this stream may use the slots for other KV."""
        if (starts := self._places.take(self._sizes(len(slots)))) is None:
            return None
        copy, here = Copy(starts, len(slots)), self._module.current_stream()
        for first, last, host in self._parts(copy):
            part = self._taken(self._out, len(host), here)
            for rows, staged in self._staged(part.words, last - first):
                torch.index_select(rows, 0, slots[first:last], out=staged)
            self._beside.wait_event(self._event(here))
            with self._module.stream(self._beside):
                host.copy_(part.words, non_blocking=True)
            self._ends(part, self._beside)
        return copy

    def fetch(self, copy: Copy) -> None:
        """Begin to bring KV back. KV longer than a buffer's part comes back only in put_back."""
        ((_, _, host), *others) = self._parts(copy)
        if others or (part := self._back.take(len(host), self._beside)) is None:
            return
        with self._module.stream(self._beside):
            part.words.copy_(host, non_blocking=True)
        part.event = self._event(self._beside)
        copy.coming = part

    def stay(self, copy: Copy) -> None:
        """Undo fetch."""
        if copy.coming is not None:
            copy.coming.is_used, copy.coming = False, None

    def put_back(self, copy: Copy, slots: torch.Tensor, num_kept: int) -> None:
        """Write KV to these slots, except that of the first num_kept tokens, and free its place."""
        here = self._module.current_stream()
        for first, last, host in self._parts(copy):
            part = copy.coming
            if part is None:
                part = self._taken(self._out, len(host), self._beside)
                with self._module.stream(self._beside):
                    part.words.copy_(host, non_blocking=True)
                part.event = self._event(self._beside)
            here.wait_event(part.event)
            kept = min(max(0, num_kept - first), last - first)
            for rows, staged in self._staged(part.words, last - first):
                rows.index_copy_(0, slots[first + kept : last], staged[kept:])
            self._ends(part, here)
        copy.coming = None
        self.free(copy)

    def free(self, copy: Copy) -> None:
        """Free the place of a copy. Later copies to it come after those of now."""
        self.stay(copy)
        self._places.give_back(copy.starts, self._sizes(copy.num_tokens))

    def _sizes(self, num_tokens: int) -> list[int]:
        """Return the words of each part of a copy."""
        most = self._part_tokens
        parts = [min(most, num_tokens - first) for first in range(0, num_tokens, most)]
        return [part_tokens * self._token_words for part_tokens in parts]

    def _parts(self, copy: Copy) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the first token of each part of a copy, the token after its last, and its place in
        host memory."""
        sizes = self._sizes(copy.num_tokens)
        for number, (start, size) in enumerate(zip(copy.starts, sizes, strict=True)):
            first, at = number * self._part_tokens, start % self._segment
            host = self._host[start // self._segment][at : at + size]
            yield first, first + size // self._token_words, host

    def _staged(
        self, words: torch.Tensor, num_tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each of the pool's buffers with its share of a part, shape (num_tokens, words)."""
        shares = words.split([num_tokens * width for width in self._widths])
        for rows, share in zip(self._rows, shares, strict=True):
            yield rows, share.view(num_tokens, -1)

    def _taken(self, buffer: _Buffer, num_words: int, stream: Any) -> _Part:
        part = buffer.take(num_words, stream)
        assert part is not None, "no KV stays in this buffer"
        return part

    def _ends(self, part: _Part, stream: Any) -> None:
        """Let the part be used again once this stream has done its present work."""
        part.event, part.is_used = self._event(stream), False

    def _event(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event
