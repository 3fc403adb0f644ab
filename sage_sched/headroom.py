"""Sizes the part of the KV pool that stays free, so that memory does not run out at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sage_sched.job import Job
from sage_sched.session_returns import SessionReturns
from sage_sched.view import SchedulerView

# The share of a busy server's time that decode steps take if sessions evict each other's KV. The
# rest are prefills of lost KV. Found on the tuning half of the agents' sessions.
_DECODE_SHARE = 0.6
# At most this many tokens of a pinned job's answer have memory reserved, as by default in SGLang
# (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION). Caps may be far larger than answers.
MOST_RESERVED_TOKENS = 4096
# The headroom in decode steps if moving KV costs next to nothing, and while no job runs.
FEWEST_STEPS = 8


@dataclass(frozen=True, slots=True)
class Headroom:
    """Room for some decode steps of all running jobs, and of jobs that are admitted or resumed.

    Nothing else is reserved for answers, so admission needs no predicted lengths. Once the room is
    used up, the last job of the order is preempted (sage_sched.preemption). Only for pinned
    jobs (Job.is_pinned), which cannot be preempted, the rest of the answer is reserved.

    pool_tokens: the size of the KV pool.
    kept_tokens: cached KV of sessions that will soon be back; no job may be admitted at its
    expense.
    """

    num_steps: int
    page_size: int
    pool_tokens: int
    reserve_tokens: int = 1
    kept_tokens: int = 0

    @classmethod
    def of(cls, view: SchedulerView, sessions: SessionReturns | None = None) -> Headroom:
        """Return the headroom with the cheapest number of steps.

        With n jobs running, H steps use up n H tokens. Then one job is preempted, and moving its KV
        costs p seconds: p / (H t) of the server's time, if a step takes t. Meanwhile n H / 2 of the
        pool's P tokens are empty on average, and with them that share of the server's work is lost.
        The sum is smallest at

            H = sqrt(2 p P / (n t))

        which is the economic order quantity (Harris 1913). Answers that end also free room, so
        fewer jobs are preempted, and H is on the safe side.
        """
        pool_tokens, reserve_tokens = view.server.kv_pool_tokens, view.server.reserve_tokens
        fewest = max(FEWEST_STEPS, reserve_tokens)
        if not view.running:
            return cls(fewest, view.page_size, pool_tokens, reserve_tokens)
        num_running, kv_tokens = len(view.running), view.running_kv_tokens
        step_s = view.server.step_time.decode_s(num_running, kv_tokens)
        price_s = _price_s(view, kv_tokens // num_running)
        worth = 2 * price_s * pool_tokens / (num_running * step_s) if step_s > 0 else 0.0
        most = max(fewest, pool_tokens // (2 * num_running))
        num_steps = min(max(fewest, math.ceil(math.sqrt(worth))), most)
        kept_tokens = _kept_tokens(view, sessions)
        return cls(num_steps, view.page_size, pool_tokens, reserve_tokens, kept_tokens)

    def left_tokens(self, job: Job) -> int:
        """Return the tokens that stay free for the rest of an answer, at least as many as a step
        sets aside."""
        if not job.is_pinned:
            return self._next_tokens(job)
        left_tokens = job.max_new_tokens - job.generated_tokens
        filled = job.input_tokens + job.generated_tokens
        # More would never be free, and it would wait for ever.
        most_tokens = self.pool_tokens - filled - 2 * self.page_size
        left_tokens = min(left_tokens, MOST_RESERVED_TOKENS, most_tokens)
        return max(self.reserve_tokens, left_tokens)

    def _next_tokens(self, job: Job) -> int:
        left_tokens = job.max_new_tokens - job.generated_tokens
        return max(self.reserve_tokens, min(self.num_steps, left_tokens))

    def needed_tokens(self, job: Job) -> int:
        """Return the KV that a waiting job needs, including a cached prefix and shared KV."""
        filled = job.input_tokens + job.generated_tokens
        return filled + self.left_tokens(job) + self.page_size

    def set_aside_tokens(self, running: Sequence[Job]) -> list[int]:
        """Return the KV to keep free for each running job: the pages that its next steps take, or
        all further ones of a pinned job."""
        return self._paged(running, map(self.left_tokens, running))

    def next_steps_tokens(self, running: Sequence[Job]) -> list[int]:
        """Return the KV that the next steps of each running job take, in whole pages. If memory
        runs out, only this much is freed, because unpinned jobs can be preempted again."""
        return self._paged(running, map(self._next_tokens, running))

    def _paged(self, running: Sequence[Job], next_tokens: Iterable[int]) -> list[int]:
        page = self.page_size
        if page == 1:
            return [*next_tokens]
        return [
            (-(-(job.held_tokens + num_tokens) // page) - -(-job.held_tokens // page)) * page
            for job, num_tokens in zip(running, next_tokens, strict=True)
        ]


def _kept_tokens(view: SchedulerView, sessions: SessionReturns | None) -> int:
    """Return the cached KV that saves more if it is kept than if other jobs run in its place.

    If running jobs hold K tokens of KV, each token stands for a K-th of a decode step's time, while
    the server decodes. So room for one more token saves that time. A cached token of a session that
    returns at a rate of r per second saves r times its prefill.
    """
    prefill_token_s = view.server.step_time.prefill_token_s
    if sessions is None or not sessions.knows or not view.server.forgets:
        return 0
    least_rate = _DECODE_SHARE / max(1e-9, view.locked_tokens * prefill_token_s)
    return sum(
        num_tokens
        for session, num_tokens in view.kv.kept_for().items()
        if least_rate < sessions.rate(session, view.now_s) < math.inf
    )


def _price_s(view: SchedulerView, kv_tokens: int) -> float:
    """Return the seconds that the server takes to preempt a job with this much KV when memory runs
    out, and to resume it. Its KV is swapped or recomputed as sage_sched.preemption decides, or
    else lost as SGLang retracts the job."""
    if view.may_preempt and kv_tokens <= view.host_free_tokens:
        return view.server.swap_s(kv_tokens)
    return view.server.recompute_s(kv_tokens)
