"""No answer stands still: how much may be prefilled before those that run get their next tokens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from sage_sched.plan import Budget
from sage_sched.view import SchedulerView

# Unless more has been prefilled since their last tokens, a pass may prefill so much: a server
# whose steps take long must not stand still either.
_LEAST_TOKENS = 64
# Gaps are counted to the tenth of a millisecond.
GAPS_PER_S = 10_000


class Gap:
    """Bounds the time between two tokens of a request that stays on the device.

    SGLang prefills whatever it may before it decodes, so prompts that keep coming can hold up
    running answers for any time. Here a decode step is due once the prefills since the last one,
    the next one and the decode step would together take longer than the bound. Times are those that
    the server has learned. The engine says what it launches: under overlap, a step's tokens come a
    pass later than the next plan.
    """

    def __init__(self, most_s: float = math.inf) -> None:
        """most_s: between two tokens; inf: no bound."""
        self._most_s = most_s
        self._anyone_waits = False
        # Prefill steps since the last decode step: requests, tokens and pairs of each.
        self._prefills: list[tuple[int, int, float]] = []

    def prefilled(self, num_requests: int, num_tokens: int, num_pairs: float) -> None:
        """A step is launched that prefills, and gives those that run no token."""
        if self._anyone_waits:
            self._prefills.append((num_requests, num_tokens, num_pairs))

    def decoded(self) -> None:
        """A step is launched that gives those that run a token."""
        self._prefills.clear()

    def within(self, budget: Budget, view: SchedulerView) -> Budget:
        """The budget of a pass, or the part of it that is prefilled in time: 0 if a decode step is
        due. Call in every pass that may prefill."""
        if self._most_s == math.inf:
            return budget
        self._anyone_waits = bool(view.running)
        if not view.running:
            self._prefills.clear()
            return budget
        step_time = view.server.step_time
        decode_s = step_time.decode_s(len(view.running), view.running_kv_tokens)
        spent_s = sum(step_time.prefill_s(*step) for step in self._prefills)
        left_s = self._most_s - decode_s - spent_s
        num_done = 0 if view.chunked is None else view.chunked.prefilled_tokens
        num_tokens = step_time.tokens_within(left_s, num_done)
        least_tokens = max(_LEAST_TOKENS, view.page_size)
        if num_tokens < least_tokens:
            if self._prefills:
                return Budget(prefill_tokens=0)
            num_tokens = least_tokens
        given = budget.prefill_tokens
        if num_tokens >= (view.pass_tokens if given is None else given):
            return budget
        return replace(budget, prefill_tokens=int(num_tokens))


def percentile_s(gaps: Counter[int], percent: float) -> float:
    """Of gaps, how often each came, in 1/GAPS_PER_S; 0 if there is none."""
    left = percent / 100 * gaps.total()
    for gap, number in sorted(gaps.items()):
        left -= number
        if left <= 0:
            return gap / GAPS_PER_S
    return 0.0
