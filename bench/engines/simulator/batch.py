"""What a scheduling pass decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.engines.simulator.request import Progress


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of one request in a prefill step, after those that are cached or done."""

    progress: Progress
    cached_tokens: int
    new_tokens: int
    completes: bool


@dataclass(slots=True)
class PassResult:
    """parts: of the prefill step. moved_tokens: swapped out and in."""

    parts: list[Part] = field(default_factory=list)
    moved_tokens: int = 0
