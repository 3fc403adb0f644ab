"""Urgency: levels of requests, with a bound on how far the more urgent may overtake the others."""

from __future__ import annotations

from dataclasses import dataclass

from sage_sched.fields import LEAST_POOLS, MOST, require_within
from sage_sched.index import Indices
from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts
from sage_sched.urgency.credit import Credit
from sage_sched.urgency.hold_back import HoldBack
from sage_sched.view import SchedulerView

# The share of the server's work that level 1 may have ahead of all others.
_CREDIT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class UrgencyParameters:
    """Settings of urgency. A pool is as many tokens as the KV pool holds.

    level_pools: a request goes before those that came up to so many pools of work before it and are
        one level less urgent.
    decode_share: the least share of the server's time for decode steps while a request of level 1
        or 2 decodes and only less urgent prompts wait. 0: prefills are not held back; 1: they all
        are.
    """

    level_pools: float = 1.0
    decode_share: float = 0.5

    def __post_init__(self) -> None:
        require_within("policy.urgency.level_pools", self.level_pools, LEAST_POOLS, MOST)
        require_within("policy.urgency.decode_share", self.decode_share, 0, 1)


class Urgency(Policy):
    """Levels 1 (most urgent) to 5 of Hints.urgency, after "Semantic Scheduling for LLM Inference".

    There the level comes before all else, and a flood of urgent requests starves the others. Here
    time, in work that the server has done, is cut into pieces of P = level_pools KV pools. With a
    the work done when a job came, and l its level, 2 or more, its bucket is floor(a / P) + l - 2.
    Buckets go in their order; the jobs of one bucket by their Gittins index (SageSched). A job of
    level 1 goes before all buckets if the credit for such jobs allows it (sage_sched.urgency.
    credit), and counts as one of level 2 if not.

    Theorem: in the order, no job j of level l (2 or more) is behind one that came when the server
    had done more than (l - 1) * P of work since j came, unless that one has credit.

    Proof: let k be such a one: a_k > a_j + (l - 1) * P. Then floor(a_k / P) >= floor(a_j / P) + l -
    1, and its level counts as 2 or more, so its bucket is at least floor(a_j / P) + l - 1, which is
    one more than that of j. QED.

    A running job yields only to a more urgent one, never to one that has merely waited for longer,
    and only if it has longer to go than its move takes. While somebody urgent decodes and only less
    urgent prompts wait, prefills take at most 1 - decode_share of the time. The paper's Algorithm 2
    holds them all back, which drains the batch.
    """

    Parameters = UrgencyParameters

    def __init__(self, parameters: UrgencyParameters, server: ServerFacts) -> None:
        self._indices = Indices(server)
        super().__init__(parameters, server, self._indices)
        self._piece_tokens = parameters.level_pools * server.kv_pool_tokens
        self._credit = Credit(_CREDIT_SHARE, server.kv_pool_tokens)
        self._hold_back = HoldBack(parameters.decode_share, self.level)
        self._claims: list[Job] = []

    def on_arrival(self, job: Job) -> bool:
        """Compute its index. A job of level 1 claims credit."""
        is_ranked = self._indices.rank(job)
        if is_ranked and job.hints.urgency == 1:
            self._claims.append(job)
        return is_ranked

    def on_pass(self, view: SchedulerView) -> None:
        """Move jobs of level 1 to the front, by arrival, as far as there is credit."""
        self._credit.look(view)
        if not self._claims:
            return
        waiting = {*view.waiting}
        self._claims = [job for job in self._claims if job in waiting]
        while self._claims and self._credit.grant(self._claims[0], _foreseen(self._claims[0])):
            self._claims.pop(0).place = None

    def key(self, job: Job, view: SchedulerView) -> float:
        """Its bucket, and its index within the bucket."""
        index = self._indices.of(job).index
        return self._bucket(job) + index / (1.0 + index)

    def _bucket(self, job: Job) -> float:
        if (level := self.level(job)) == 1:
            return -1.0
        return job.served_at_arrival_tokens // self._piece_tokens + level - 2

    def level(self, job: Job) -> int:
        """The level that counts for a job: 1 only with credit."""
        return 1 if self._credit.has_grant(job) else max(2, job.hints.urgency)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """To a more urgent one, if the running job has longer to go than its move takes."""
        if self.level(waiting) >= self.level(running):
            return False
        return left_s(running, self._indices, view) > price_s

    def budget(self, view: SchedulerView) -> Budget | None:
        """Hold prefills back while somebody urgent decodes."""
        return self._hold_back.budget(view)


def left_s(running: Job, indices: Indices, view: SchedulerView) -> float:
    """Expected seconds until a running job ends, at the present step time."""
    step_s = view.server.step_time.decode_s(len(view.running), view.running_kv_tokens)
    return indices.of(running).steps * step_s


def _foreseen(job: Job) -> float:
    """Tokens that it is expected to need, prefill and decode."""
    return job.input_tokens - job.cached_input_tokens + job.mean_tokens()
