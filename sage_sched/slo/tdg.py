"""Token-level deadline gain (ProServe, section 2): what tokens on time are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from sage_sched.job import Hints


@dataclass(frozen=True, slots=True)
class Promise:
    """When the tokens of one answer are due, and what each is worth if it is on time.

    ttft_s: after its arrival, for the first; inf: whenever. tpot_s: more for each further one.
    first_weight, next_weight: of the first token and of each further one, above 0.
    buffer: whether a token that comes early gives the next ones more time. If not, theirs counts
        from the first token, if that was on time (ProServe, footnote 2).
    """

    ttft_s: float
    tpot_s: float
    first_weight: float = 1.0
    next_weight: float = 1.0
    buffer: bool = True

    @classmethod
    def of(cls, hints: Hints) -> Self:
        """What was said of a request."""
        ttft_ms, tpot_ms = hints.ttft_slo_ms, hints.tpot_slo_ms
        return cls(
            math.inf if ttft_ms is None else ttft_ms / 1e3,
            math.inf if tpot_ms is None else tpot_ms / 1e3,
            hints.weight * hints.first_token_weight,
            hints.weight,
            hints.first_token_buffer,
        )

    def due_s(self, token: int, ttft_s: float) -> float:
        """When a token (1: the first) is due, seconds after the request's arrival.

        ttft_s: when its first token came, after its arrival; of no account for that one.
        """
        if token == 1:
            return self.ttft_s
        start_s = self.ttft_s if self.buffer else min(self.ttft_s, ttft_s)
        return start_s + (token - 1) * self.tpot_s

    def gained(self, first_is_on_time: bool, num_next_on_time: int) -> float:
        """What an answer is worth: so many of its further tokens were on time."""
        return self.first_weight * first_is_on_time + self.next_weight * num_next_on_time

    def ideal(self, num_tokens: int) -> float:
        """What an answer of so many tokens, at least one, is worth if all are on time."""
        return self.gained(True, num_tokens - 1)


def num_on_time(
    num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float
) -> int:
    """How many of the tokens of so many decode steps are on time, each step growth_s longer than
    the one before: token j comes after `j first_s + growth_s j (j-1) / 2`.

    due_s: when the first of them is due, from now; the others tpot_s later each. What token j is
    late by is a convex function of j, so those on time are neighbours, between its roots.
    """
    if num_steps <= 0 or due_s == math.inf:
        return max(0, num_steps)
    if tpot_s == math.inf:
        return num_steps if first_s <= due_s else num_steps - 1

    def is_late(j: int) -> bool:
        return j * first_s + growth_s * (j * (j - 1) / 2) > due_s + (j - 1) * tpot_s

    half = growth_s / 2
    linear, constant = first_s - half - tpot_s, tpot_s - due_s
    if half * num_steps * num_steps <= 1e-12 * max(first_s, tpot_s):
        if linear == 0:
            return 0 if is_late(1) else num_steps
        root = -constant / linear
        low, high = (root, math.inf) if linear < 0 else (-math.inf, root)
    else:
        square = linear * linear - 4 * half * constant
        if square < 0:
            return 0
        # Of the two ways to write a root, the one without cancellation.
        far = -(linear + math.copysign(math.sqrt(square), linear)) / 2
        low, high = sorted((far / half, constant / far)) if far else (0.0, 0.0)
    first = max(1, math.ceil(max(low, 0.0) - 1e-9))
    last = min(num_steps, math.floor(min(high, num_steps) + 1e-9))
    # By a rounding error one may be taken for another.
    while first <= last and is_late(first):
        first += 1
    while last >= first and is_late(last):
        last -= 1
    while first > 1 and first <= num_steps + 1 and not is_late(first - 1):
        first -= 1
    while last < num_steps and not is_late(max(last, 0) + 1):
        last += 1
    return max(0, last - first + 1)
