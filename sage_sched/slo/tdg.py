"""Token-level deadline gain (ProServe, section 2): what tokens on time are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from sage_sched.job import Hints


@dataclass(frozen=True, slots=True)
class Promise:
    """When the tokens of an answer are due, and what each is worth if it is on time.

    ttft_s: when the first token is due, after the request's arrival; inf: no deadline.
    tpot_s: how much later each further token is due.
    first_weight, next_weight: what the first token and each further one is worth, above 0.
    buffer: whether an early token gives the next ones more time. If not, their deadlines count from
        the first token, if that was on time (ProServe, footnote 2).
    """

    ttft_s: float
    tpot_s: float
    first_weight: float = 1.0
    next_weight: float = 1.0
    buffer: bool = True

    @classmethod
    def of(cls, hints: Hints) -> Self:
        ttft_ms, tpot_ms = hints.ttft_slo_ms, hints.tpot_slo_ms
        return cls(
            math.inf if ttft_ms is None else ttft_ms / 1e3,
            math.inf if tpot_ms is None else tpot_ms / 1e3,
            hints.weight * hints.first_token_weight,
            hints.weight,
            hints.first_token_buffer,
        )

    def due_s(self, token: int, ttft_s: float) -> float:
        """When a token (1: the first) is due, in seconds after the request's arrival.

        ttft_s: when the first token came; without effect for token 1.
        """
        if token == 1:
            return self.ttft_s
        start_s = self.ttft_s if self.buffer else min(self.ttft_s, ttft_s)
        return start_s + (token - 1) * self.tpot_s

    def gained(self, first_is_on_time: bool, num_next_on_time: int) -> float:
        """What an answer is worth if so many of its further tokens were on time."""
        return self.first_weight * first_is_on_time + self.next_weight * num_next_on_time

    def ideal(self, num_tokens: int) -> float:
        """What an answer of num_tokens, at least 1, is worth if all are on time."""
        return self.gained(True, num_tokens - 1)
