"""Bounds the time between two tokens of a request that stays on the device."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from sage_sched.limit import Limit
from sage_sched.plan import Budget
from sage_sched.steps import FEW_CUTS, MANY_CUTS, least_bound_s
from sage_sched.view import SchedulerView

# If nothing was prefilled since the last decode step, a pass may prefill this many tokens, even
# beyond the bound.
_LEAST_TOKENS = 64
# Gaps are counted to the tenth of a millisecond.
GAPS_PER_S = 10_000


class Gap(Limit):
    """Bounds the time between two tokens of a request that stays on the device.

    SGLang prefills as much as it can before it decodes, so a stream of prompts can delay running
    answers for any time. Here a decode step is due once the prefills since the last one, the next
    prefill and the decode step would together take longer than the bound. Times come from the
    learned step times. The engine reports each launched step: under overlap, a step's tokens come a
    pass later than the next plan.
    """

    def __init__(
        self, most_s: float = math.inf, holds_tpot: bool = False, cuts: int = MANY_CUTS
    ) -> None:
        """Bound the time by most_s (inf: no bound).

        holds_tpot: whether the TPOT targets of running requests bound the time too.
        cuts: FEW_CUTS or MANY_CUTS, the time that cuts may take to keep most_s.
        """
        self._most_s = most_s
        self._cuts = cuts
        self._holds_tpot = holds_tpot
        self._anyone_waits = False
        # Prefill steps since the last decode step: requests, tokens and pairs of each.
        self._prefills: list[tuple[int, int, float]] = []

    def prefilled(self, num_requests: int, num_tokens: int, num_pairs: float) -> None:
        if self._anyone_waits:
            self._prefills.append((num_requests, num_tokens, num_pairs))

    def decoded(self) -> None:
        self._prefills.clear()

    def within(self, budget: Budget, view: SchedulerView) -> Budget:
        """Return the budget, cut to the tokens that can be prefilled within the bound: 0 if a
        decode step is due."""
        self._anyone_waits = bool(view.running)
        holds = view.running if self._holds_tpot else ()
        tpot_s = min([job.hints.tpot_slo_ms or math.inf for job in holds], default=math.inf) / 1e3
        if not view.running or min(self._most_s, tpot_s) == math.inf:
            self._prefills.clear()
            return budget
        decode_s = view.server.decode_beside_s(len(view.running), view.running_kv_tokens)
        step_time = view.server.step_time
        cuts = MANY_CUTS if view.server.mixes_steps else FEW_CUTS
        most_s = min(
            max(self._most_s, least_bound_s(decode_s, step_time, self._cuts)),
            max(tpot_s, least_bound_s(decode_s, step_time, cuts)),
        )
        left_s = most_s - decode_s - sum(step_time.prefill_s(*step) for step in self._prefills)
        num_done = sum(job.prefilled_tokens for job in view.chunked_jobs)
        num_tokens = step_time.tokens_within(left_s, num_done)
        least_tokens: float = max(_LEAST_TOKENS, view.page_size)
        if self._prefills:
            # Another prefill step is worth its fixed time only if that is at most half of the step.
            least_tokens = max(
                least_tokens, step_time.tokens_within(2 * step_time.prefill_base_s, num_done)
            )
        if num_tokens < least_tokens:
            if self._prefills:
                return Budget(prefill_tokens=0)
            num_tokens = least_tokens
        given = budget.prefill_tokens
        if num_tokens >= (view.pass_tokens if given is None else given):
            return budget
        return replace(budget, prefill_tokens=int(num_tokens))


def percentile_s(gaps: Counter[int], percent: float) -> float:
    """Return a percentile of gaps in seconds; 0 if there is none.

    gaps: how often each gap came, by its length in 1/GAPS_PER_S seconds.
    """
    left = percent / 100 * gaps.total()
    for gap, number in sorted(gaps.items()):
        left -= number
        if left <= 0:
            return gap / GAPS_PER_S
    return 0.0
