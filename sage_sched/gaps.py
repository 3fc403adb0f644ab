"""Bounds the time between two tokens of a request, which stays on the device or is swapped out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from sage_sched.job import BEHIND, Job
from sage_sched.limit import Limit
from sage_sched.plan import Budget
from sage_sched.steps import FEW_CUTS, MANY_CUTS, least_bound_s
from sage_sched.view import SchedulerView

# If nothing was prefilled since the last decode step, a pass may prefill this many tokens, even
# beyond the bound.
_LEAST_TOKENS = 64
# Gaps are counted to the tenth of a millisecond.
GAPS_PER_S = 10_000
# A resumed job that has passed the bound stays on the device for this many tokens. 32 or 128 are as
# good. If it stayed to its end, mean TTLT would rise by 13 % (the README's traffic, bound of 60 s;
# simulated).
_STAY_TOKENS = 64
# If turns would take more of the slots' time, no job is swapped out for a new one. On 48 slots, 79,
# 60 and 46 % of requests are good at 1.15, 1.3 and 1.6 times the capacity; with 0.25, 77, 62 and
# 50 %, but a p99 TTFT of 5 minutes at 1.15; without, 79, 58 (at 0.5) and 28 % (README's traffic,
# seeds that no record has). Where memory runs out before slots, this does not apply.
_TURNS_SHARE = 0.35


class Gap(Limit):
    """Bounds the time between two tokens of a request that stays on the device.

    SGLang prefills as much as it can before it decodes, so a stream of prompts can delay running
    answers without limit. Here a decode step is due once the prefills since the last one, the next
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


class SwapOutBound(Limit):
    """Bounds the time between two tokens of a swapped-out job.

    A job that has been swapped out for longer than most_s seconds has passed the bound
    (Job.passed_swap_out_bound). It goes before all others of its level, as if it had passed the
    starvation bound. Jobs that have passed neither bound are preempted for it, whatever that costs.
    After _STAY_TOKENS tokens, its turn, it may be preempted again. It keeps waiting if a policy
    holds it back (Policy.key), or if the jobs that may be preempted hold too little memory.

    next_s: when the next job will pass the bound.
    room: how many more jobs may be swapped out for jobs that have passed no bound. With more, turns
        would take more than _TURNS_SHARE of the slots' time.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        # The age of each swapped-out job, and when a pass first saw it.
        self._away: dict[Job, tuple[int, float]] = {}
        # For jobs that have passed the bound, the age at which they may be preempted again.
        self._stays_until: dict[Job, int] = {}
        # Whether their times have to be measured again: jobs have begun or ceased to wait.
        self._has_changed = True

    def is_like(self, other: Limit) -> bool:
        return isinstance(other, SwapOutBound) and self._most_s == other._most_s

    def arrived(self, job: Job) -> None:
        if job.passed_swap_out_bound:  # of the bound that this one replaces
            job.pass_swap_out_bound(False)

    def queued(self, jobs: Iterable[Job]) -> None:
        self._has_changed = True

    def dequeued(self, jobs: Iterable[Job]) -> None:
        self._has_changed = True

    def look(self, view: SchedulerView, begun: Collection[Job]) -> None:
        """Find the jobs that have passed the bound."""
        if self._most_s == math.inf:
            return
        if self._has_changed or view.now_s > self.next_s:
            self._has_changed = self._measure(view, begun)
        if view.running:
            self.room = self._most_jobs(view) - len(self._away)
        if self._stays_until:
            present = {*begun, *view.running, *view.chunked_jobs}
            ended = {job for job, age in self._stays_until.items() if job.generated_tokens >= age}
            for job in [job for job in self._stays_until if job in ended or job not in present]:
                del self._stays_until[job]
                job.pass_swap_out_bound(False)

    def _measure(self, view: SchedulerView, begun: Collection[Job]) -> bool:
        """Measure how long jobs have been away; return whether to do so again even if no job begins
        or ceases to wait: some do not count at present, or have come back without a token yet.
        These have been away until that token, because they may leave again before it."""
        before, self._away, self.next_s = self._away, {}, math.inf
        back = [job for job in before if job not in begun]
        running = {*view.running} if back else ()
        back = [job for job in back if job in running and job.generated_tokens == before[job][0]]
        again = bool(back)
        for job in (*begun, *back):
            if job.level >= BEHIND // 2:
                again = True
                continue
            age, left_s = before.get(job, (-1, view.now_s))
            if age != job.generated_tokens:
                age, left_s = job.generated_tokens, view.now_s
            self._away[job] = age, left_s
            if job.goes_first:
                again |= not job.passed_swap_out_bound
                continue
            if view.now_s - left_s > self._most_s:
                self._stays_until[job] = age + _STAY_TOKENS
                job.pass_swap_out_bound(True)
            else:
                self.next_s = min(self.next_s, left_s + self._most_s)
        return again

    def _most_jobs(self, view: SchedulerView) -> float:
        """Return how many jobs can have their turns within the bound, in _TURNS_SHARE of the slots'
        time."""
        server = view.server
        step_s = server.step_time.decode_s(len(view.running), server.kv_pool_tokens)
        turns = self._most_s / (_STAY_TOKENS * step_s)
        return server.max_running_requests * _TURNS_SHARE * turns


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
