"""No answer stands still: how much may be prefilled before those that run get their next tokens."""

from __future__ import annotations

import math
from dataclasses import replace

from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.steps import StepTime, attended_pairs
from sage_sched.view import SchedulerView

# Unless more has been prefilled since their last tokens, a pass may prefill so much: a server
# whose steps take long must not stand still either.
_LEAST_TOKENS = 64


class Gap:
    """Bounds the time between two tokens of a request that stays on the device.

    SGLang prefills whatever it may before it decodes, so prompts that keep coming can hold up
    running answers for any time. Here a decode step is due once the prefills since the last one,
    the next one and the decode step would together take longer than the bound. Times are those that
    the server has learned. A server that decodes beside a prefill (--enable-mixed-chunk) is bound
    step by step.
    """

    def __init__(self, most_s: float = math.inf) -> None:
        """most_s: between two tokens; inf: no bound."""
        self._most_s = most_s
        self._prefilled_s = 0.0  # since those that run had a token
        self._served_tokens = 0
        # Of one that ran at the last look: its age tells whether a decode step has been since.
        self._witness: tuple[Job, int] | None = None

    def within(self, budget: Budget, view: SchedulerView) -> Budget:
        """The budget of a pass, or the part of it that is prefilled in time: 0 if a decode step is
        due. Call once per pass."""
        if self._most_s == math.inf:
            return budget
        self._look(view)
        if not view.running:
            return budget
        step_time = view.server.step_time
        decode_s = step_time.decode_s(len(view.running), view.running_kv_tokens)
        left_s = self._most_s - decode_s - self._prefilled_s
        num_tokens = _tokens_within(left_s, _done_tokens(view), step_time)
        if num_tokens < max(_LEAST_TOKENS, view.page_size):
            if self._prefilled_s:
                self._prefilled_s = 0.0
                return Budget(prefill_tokens=0)
            num_tokens = max(_LEAST_TOKENS, view.page_size)
        given = budget.prefill_tokens
        if num_tokens >= (view.pass_tokens if given is None else given):
            return budget
        return replace(budget, prefill_tokens=int(num_tokens))

    def _look(self, view: SchedulerView) -> None:
        """Count what has been prefilled since those that run had a token."""
        num_new = view.served_tokens - self._served_tokens
        if view.server.mixes_steps or not self._waits_still(view):
            self._prefilled_s = 0.0
        elif num_new > 0:
            pairs = attended_pairs(max(0, _done_tokens(view) - num_new), num_new)
            self._prefilled_s += view.server.step_time.prefill_s(1, num_new, pairs)
        self._served_tokens = view.served_tokens
        first = view.running[0] if view.running else None
        self._witness = None if first is None else (first, first.generated_tokens)

    def _waits_still(self, view: SchedulerView) -> bool:
        """Whether the one that ran at the last look runs still, and has had no token since."""
        if self._witness is None:
            return False
        job, generated_tokens = self._witness
        return job.generated_tokens == generated_tokens and job in view.running


def _done_tokens(view: SchedulerView) -> int:
    """Of the prompt that is prefilled next, what is done."""
    return 0 if view.chunked is None else view.chunked.prefilled_tokens


def _tokens_within(left_s: float, num_done: int, step_time: StepTime) -> float:
    """How many tokens a prefill step computes in so long, after num_done of the same prompt."""
    left_s -= step_time.prefill_s(1, 0, 0.0)
    if left_s <= 0:
        return 0
    # The pairs are n (num_done + n / 2).
    linear_s = step_time.prefill_token_s + step_time.prefill_pair_s * num_done
    square_s = step_time.prefill_pair_s / 2
    if square_s == 0:
        return math.inf if linear_s == 0 else left_s / linear_s
    root = math.sqrt(linear_s**2 + 4 * square_s * left_s)
    return (root - linear_s) / (2 * square_s)
