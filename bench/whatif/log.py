"""The traffic of a log: arrivals, lengths, and the rest of each request's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.workloads.prompts import stable_hash
from sage_sched.distribution import LengthDistribution

_BLOCK_TOKENS, BLOCK_CHARS = 64, 256


@dataclass(frozen=True, slots=True)
class Logged:
    """One request of a log.

    arrival_s: on the log's own clock.
    cap_tokens: its max_new_tokens. None if the log does not give it. 0 if it has none: its cap is
        then the rest of the context.
    is_cut: whether a cap or its client ended the answer, so that its own length is unknown.
    prompt: the excerpt of the prompt that is embedded; "" if it is unknown.
    prompt_chars: the number of characters of the whole prompt.
    blocks: the prompt's blocks, each a hash of the prompt up to the end of that block.
    block_tokens: the size of a block in tokens; 0 if it has BLOCK_CHARS characters instead.
    ttlt_s: the server's time to its last token; None if the log does not give it.
    forecast: the prediction of a server in shadow mode.
    session, id, parent, pause_s: see LoggedRequest.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cap_tokens: int | None = None
    is_cut: bool = False
    prompt: str = ""
    prompt_chars: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    ttlt_s: float | None = None
    forecast: LengthDistribution | None = None
    session: str = ""
    id: str = ""
    parent: str = ""
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrafficLog:
    """Requests in order of arrival, the first at 0. lines: remarks and cautions for the user."""

    requests: tuple[Logged, ...]
    lines: tuple[str, ...] = ()

    @property
    def last_arrival_s(self) -> float:
        """Return the time of the last arrival; the first is at 0."""
        return self.requests[-1].arrival_s

    def mean_ttlt_s(self) -> float | None:
        """Return the recorded mean; None unless all requests have a TTLT."""
        ttlts_s = [request.ttlt_s for request in self.requests if request.ttlt_s is not None]
        return sum(ttlts_s) / len(ttlts_s) if len(ttlts_s) == len(self.requests) else None


def in_order(requests: Sequence[Logged]) -> tuple[Logged, ...]:
    """Sort by arrival, and move the first to 0."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    begin_s = ordered[0].arrival_s
    return tuple(replace(each, arrival_s=each.arrival_s - begin_s) for each in ordered)


def blocks_of(prompt: str | Sequence[int] | None) -> tuple[tuple[int, ...], int]:
    """Return the blocks of a prompt's text or token ids, and the tokens of one block (0 for a
    text). If two prompts have a block in common, they are equal up to its end."""
    if not prompt:
        return (), 0
    is_text = isinstance(prompt, str)
    size = BLOCK_CHARS if is_text else _BLOCK_TOKENS
    so_far, blocks = 0, []
    for end in range(size, len(prompt) + 1, size):
        so_far = stable_hash(f"{so_far} {prompt[end - size : end]!r}") >> 2
        blocks.append(so_far)
    return tuple(blocks), 0 if is_text else size
