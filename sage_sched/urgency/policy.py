"""Urgency: levels of requests, with a bound on how far the more urgent may overtake the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from sage_sched.fields import LEAST_POOLS, MOST, require_within
from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.policies.sage import Sage, SageParameters
from sage_sched.steps.time import ServerFacts
from sage_sched.urgency.credit import Credit
from sage_sched.view import SchedulerView

# Those for whom prefills of others are held back while they decode.
_URGENT = 2


@dataclass(frozen=True, slots=True)
class UrgencyParameters:
    """Settings of urgency. A pool is as many tokens as the KV pool holds.

    level_pools: a request goes before those that have come for up to so many pools of work before
        it and are one level less urgent.
    share: of the server's work, for level 1 ahead of all others.
    decode_share: of its time, at least, for decode steps while a request of level 1 or 2 decodes
        and only less urgent prompts wait. 0: prefills are not held back; 1: they all are.
    by_length: whether those of a level that come together go by their Gittins index, or by arrival.
    preempts: whether running requests yield.
    """

    level_pools: float = 1.0
    share: float = 0.5
    decode_share: float = 0.5
    by_length: bool = True
    preempts: bool = True

    def __post_init__(self) -> None:
        require_within("policy.urgency.level_pools", self.level_pools, LEAST_POOLS, MOST)
        require_within("policy.urgency.share", self.share, 0, 1)
        require_within("policy.urgency.decode_share", self.decode_share, 0, 1)


class Urgency(Sage):
    """Levels 1 (most urgent) to 5 of Hints.urgency, after "Semantic Scheduling for LLM Inference".

    There the level comes before all else, and a flood of urgent requests starves the others. Here
    time, in work that the server has done, is cut into pieces of P = level_pools KV pools. With a
    the work done when a job came, and l its level, 2 or more, its bucket is floor(a / P) + l - 2.
    Buckets go in their order; those of one by their Gittins index (SageSched). A job of level 1
    goes before all buckets if the credit for such allows it (sage_sched.urgency.credit), and
    counts as one of level 2 if not.

    Theorem: in the order, no job j of level l (2 or more) is behind one that came when the server
    had done more than (l - 1) * P of work since j came, unless that one has credit.

    Proof: let k be such a one: a_k > a_j + (l - 1) * P. Then floor(a_k / P) >= floor(a_j / P) + l -
    1, and its level counts as 2 or more, so its bucket is at least floor(a_j / P) + l - 1, which is
    one more than that of j. QED.

    One that runs yields to a more urgent one alone, never to one that has merely waited for longer,
    and if it has longer to go than its move takes. While somebody urgent decodes, and whoever waits
    is less urgent, prefills take at most 1 - decode_share of the time; the paper's Algorithm 2
    holds them all back, which drains the batch.
    """

    Parameters = UrgencyParameters  # type: ignore[assignment]
    variants: ClassVar = {
        "urgency-order": {"preempts": False},
        "urgency-arrival": {"by_length": False},
    }

    def __init__(self, parameters: UrgencyParameters, server: ServerFacts) -> None:
        order_alone = SageParameters(
            aging_pools=math.inf, regret=math.inf, preempts=parameters.preempts, sessions=False
        )
        super().__init__(order_alone, server)
        self._urgency = parameters
        self._piece_tokens = parameters.level_pools * server.kv_pool_tokens
        self._credit = Credit(parameters.share, server.kv_pool_tokens)
        self._claims: list[Job] = []
        self._owed_steps = 0
        self._prefills_since_tokens: int | None = None

    def on_arrival(self, job: Job) -> bool:
        """Its index, and its claim on the credit if it is of level 1."""
        is_ranked = super().on_arrival(job)
        if is_ranked and job.hints.urgency == 1:
            self._claims.append(job)
        return is_ranked

    def on_pass(self, view: SchedulerView) -> None:
        """Grant those of level 1 their way to the front, by arrival, as far as there is credit."""
        self._credit.look(view)
        if not self._claims:
            return
        waiting = {*view.waiting}
        self._claims = [job for job in self._claims if job in waiting]
        while self._claims and self._credit.grant(self._claims[0], _foreseen(self._claims[0])):
            self._claims.pop(0).place = None

    def key(self, job: Job, view: SchedulerView) -> float:
        """Its bucket, and in it its index."""
        index = self._at_its_age(job).index if self._urgency.by_length else 0.0
        within = index / (1.0 + index)
        if (level := self.level(job)) == 1:
            return within - 1.0
        return job.served_at_arrival_tokens // self._piece_tokens + level - 2 + within

    def level(self, job: Job) -> int:
        """Which counts for it: 1 only with credit."""
        return 1 if self._credit.has_grant(job) else max(2, job.hints.urgency)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """To a more urgent one, if it has longer to go than its move takes."""
        if self.level(waiting) >= self.level(running):
            return False
        step_time, num_running = view.server.step_time, len(view.running)
        kv_tokens = sum([job.input_tokens + job.generated_tokens for job in view.running])
        left_s = self._at_its_age(running).steps * step_time.decode_s(num_running, kv_tokens)
        return left_s > price_s

    def budget(self, view: SchedulerView) -> Budget | None:
        """Decode steps alone until those that run have had their share after the last prefill."""
        worked_tokens = self._worked_since_prefill(view)
        if not self._holds_back(view):
            self._owed_steps = 0
            return None
        share, step_time = self._urgency.decode_share, view.server.step_time
        kv_tokens = sum([job.input_tokens + job.generated_tokens for job in view.running])
        decode_s = step_time.decode_s(len(view.running), kv_tokens)
        if worked_tokens:
            prefill_s = step_time.prefill_s(1, worked_tokens, 0.0)
            self._owed_steps = math.ceil(prefill_s * share / max(1e-9, 1 - share) / decode_s)
        if share == 1 or self._owed_steps > 0:
            self._owed_steps -= 1
            return Budget(prefill_tokens=0, reason="somebody urgent decodes")
        self._prefills_since_tokens = view.served_tokens
        return None

    def _worked_since_prefill(self, view: SchedulerView) -> int:
        """What the server has done since a pass that was let prefill; 0 if none was."""
        since_tokens, self._prefills_since_tokens = self._prefills_since_tokens, None
        return 0 if since_tokens is None else view.served_tokens - since_tokens

    def _holds_back(self, view: SchedulerView) -> bool:
        """Whether somebody urgent decodes and whoever waits for a prefill is less urgent."""
        if not self._urgency.decode_share or view.batch_is_full:
            return False
        best = self._best_level(view.running)
        waiting = [job for job in view.waiting if job not in view.swapped]
        if view.chunked is not None:
            waiting.append(view.chunked)
        return best <= _URGENT and self._best_level(waiting) > best

    def _best_level(self, jobs: Iterable[Job]) -> int:
        return min((self.level(job) for job in jobs if job.is_ranked), default=6)


def _foreseen(job: Job) -> float:
    """Tokens that it will take."""
    assert job.distribution is not None
    mean_tokens = job.distribution.capped(job.max_new_tokens).mean()
    return job.input_tokens - job.cached_input_tokens + mean_tokens
