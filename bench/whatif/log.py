"""The traffic of a log: who came when, how long prompt and answer were, and what else is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.workloads.prompts import WorkloadError, stable_hash
from sage_sched.distribution import LengthDistribution

_BLOCK_TOKENS, BLOCK_CHARS = 64, 256


@dataclass(frozen=True, slots=True)
class Logged:
    """One request of a log.

    arrival_s: on the log's own clock. cap_tokens: its max_new_tokens; None if the log does not say,
    0 if it has none, so that the rest of the context is its cap. is_cut: whether its answer was
    ended by something else than itself, so that nobody knows how long it was to be.
    prompt: its text, "" if it is not known. blocks: of its prompt, each standing for itself and all
    before it; block_tokens: how long one is.
    ttlt_s: what the server took to its last token; None if the log does not say. forecast: what a
    server in shadow mode predicted.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cap_tokens: int | None = None
    is_cut: bool = False
    prompt: str = ""
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    ttlt_s: float | None = None
    forecast: LengthDistribution | None = None

    def problem(self) -> str:
        """Why it is of no use, or ""."""
        if not math.isfinite(self.arrival_s):
            return f"its arrival is {self.arrival_s}, allowed: a number of seconds"
        if min(self.input_tokens, self.output_tokens) < 1:
            return (
                f"it has {self.input_tokens} input and {self.output_tokens} output tokens, "
                "allowed: at least 1 of each"
            )
        if self.ttlt_s is not None and not 0 <= self.ttlt_s < math.inf:
            return f"its time to the last token is {self.ttlt_s} s, allowed: 0 or more"
        return ""


@dataclass(frozen=True, slots=True)
class TrafficLog:
    """Requests in order of arrival, the first at 0. description: what they were read from, for
    people. num_unusable, first_unusable: rows that were left out, and why the first one was."""

    requests: tuple[Logged, ...]
    description: str
    num_unusable: int = 0
    first_unusable: str = ""

    @property
    def arrivals_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s

    def mean_ttlt_s(self) -> float | None:
        """What the log says that the server did; None unless it says so of all."""
        told = [request.ttlt_s for request in self.requests if request.ttlt_s is not None]
        return sum(told) / len(told) if len(told) == len(self.requests) else None

    def first(self, num_requests: int | None) -> TrafficLog:
        """No more than so many."""
        return replace(self, requests=self.requests[:num_requests])


@dataclass(slots=True)
class Collected:
    """Requests as they are read; what is wrong with a row costs that row alone."""

    kinds: dict[str, int] = field(default_factory=dict)
    requests: list[Logged] = field(default_factory=list)
    num_unusable: int = 0
    first_unusable: str = ""

    def add(self, kind: str, place: str, request: Logged) -> None:
        """kind: what the row was found to be, for people."""
        if problem := request.problem():
            self.leave_out(f"{place}: {problem}")
            return
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.requests.append(request)

    def leave_out(self, why: str) -> None:
        self.num_unusable += 1
        self.first_unusable = self.first_unusable or why

    def log(self, names: Sequence[str]) -> TrafficLog:
        """names: of what was read. Raises WorkloadError if nothing was of use."""
        if not self.requests:
            why = f": {self.first_unusable}" if self.first_unusable else ""
            raise WorkloadError(
                f"{', '.join(names)}: no request found{why}. docs/whatif.md says what can be read"
            )
        ordered = sorted(self.requests, key=lambda request: request.arrival_s)
        begin_s = ordered[0].arrival_s
        moved = (replace(each, arrival_s=each.arrival_s - begin_s) for each in ordered)
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        return TrafficLog(tuple(moved), kinds, self.num_unusable, self.first_unusable)


def blocks_of(prompt: str | Sequence[int] | None) -> tuple[tuple[int, ...], int]:
    """The blocks of a prompt's text or token ids, and how many tokens one has, 0 of a text. Equal
    numbers: prompts are alike up to the end of that block."""
    if not prompt:
        return (), 0
    is_text = isinstance(prompt, str)
    size = BLOCK_CHARS if is_text else _BLOCK_TOKENS
    so_far, blocks = 0, []
    for end in range(size, len(prompt) + 1, size):
        so_far = stable_hash(f"{so_far} {prompt[end - size : end]!r}") >> 2
        blocks.append(so_far)
    return tuple(blocks), 0 if is_text else size
