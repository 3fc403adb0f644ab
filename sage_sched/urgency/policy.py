"""Serves by levels of urgency, with a bound on how far more urgent requests may overtake others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sage_sched.fields import Pools, Share
from sage_sched.index import Indices
from sage_sched.job import Job
from sage_sched.plan import Budget, NextPlan
from sage_sched.policy import Lasting, Policy, Traits
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue

# Prefills of other jobs are held back for requests of this level or better.
_URGENT = 2
_NO_LEVEL = 6
# By how much the lasting keys of two buckets differ; logarithms of indices differ by far less.
_APART = 1e3


@dataclass(frozen=True, slots=True)
class UrgencyParameters:
    """Settings of urgency. A pool is as many tokens as the KV pool holds."""

    level_pools: Pools = 1.0
    """Head start of a level over the next less urgent one. 1: the work of as many tokens as the KV
    pool holds."""
    decode_share: Share = 0.5
    """At least this share of the time goes to decode steps of levels 1 and 2 while only less urgent
    prompts wait."""


class Urgency(Policy):
    """Serves by levels, 1 (most urgent) to 5, of Hints.urgency, after "Semantic Scheduling for LLM
    Inference".

    In the paper the level comes before all else, and a flood of urgent requests starves the others.
    Here time is measured by the work that the server has done, in pieces of P = level_pools KV
    pools. Let a be the work done when a job came, and l its level. Its bucket is floor(a / P) + l.
    Buckets go in their order, and the jobs of one bucket by their Gittins index (SageSched).

    Theorem: in the order, no job j of level l is behind a job that came when the server had done
    more than l * P of work since j came.

    Proof: let k be such a job: a_k > a_j + l * P. Then floor(a_k / P) >= floor(a_j / P) + l, and
    its level is 1 or more, so its bucket is a later one than the bucket of j. QED.

    A running job is preempted only for a more urgent job, never for a job that has merely waited
    longer, and only if the rest of the running job's answer takes longer than moving its KV. While
    an urgent job decodes and only less urgent prompts wait, prefills take at most 1 - decode_share
    of the time. The paper's Algorithm 2 holds back all of these prefills, which drains the batch.
    """

    Parameters = UrgencyParameters
    traits = Traits(predicts_waits=True)

    def __init__(self, parameters: UrgencyParameters, server: ServerFacts) -> None:
        self._indices = Indices(server)
        super().__init__(parameters, server, self._indices)
        self._piece_tokens = parameters.level_pools * server.kv_pool_tokens
        self._share: float = parameters.decode_share
        # Waiting jobs of urgent levels.
        self._urgent: dict[Job, None] = {}
        self._owed_steps = 0
        self._prefills_since_tokens: int | None = None

    def key(self, job: Job, view: SchedulerView) -> float:
        index = self._indices.of(job).index
        return self._bucket(job) + index / (1.0 + index)

    def lasting(self, job: Job) -> Lasting:
        lasting = super().lasting(job)
        return lasting._replace(key=_APART * self._bucket(job) + lasting.key)

    def _bucket(self, job: Job) -> float:
        return job.served_at_arrival_tokens // self._piece_tokens + self.level(job)

    def level(self, job: Job) -> int:
        """Return the job's level. Smaller is more urgent."""
        return job.hints.urgency

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """Preempt for a more urgent job, if the rest of the running job's answer takes longer than
        moving its KV."""
        if self.level(waiting) >= self.level(running):
            return False
        step_s = view.server.step_time.decode_s(len(view.running), view.running_kv_tokens)
        return self._indices.of(running).steps * step_s > price_s

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        for job in queue.left:
            self._urgent.pop(job, None)
        self._urgent.update((job, None) for job in queue.came if self.level(job) <= _URGENT)
        return NextPlan()

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        """While prefills are held back, allow only decode steps after a prefill, until running jobs
        have had their share of the time."""
        # The server's work since the last pass, if that pass was allowed to prefill.
        since_tokens, self._prefills_since_tokens = self._prefills_since_tokens, None
        worked_tokens = 0 if since_tokens is None else view.served_tokens - since_tokens
        if not self._holds_back(view, queue):
            self._owed_steps = 0
            return None
        share, step_time = self._share, view.server.step_time
        decode_s = step_time.decode_s(len(view.running), view.running_kv_tokens)
        if worked_tokens:
            prefill_s = step_time.prefill_s(1, worked_tokens, 0.0)
            self._owed_steps = math.ceil(prefill_s * share / max(1e-9, 1 - share) / decode_s)
        if share == 1 or self._owed_steps > 0:
            self._owed_steps -= 1
            return Budget(prefill_tokens=0)
        self._prefills_since_tokens = view.served_tokens
        return None

    def _holds_back(self, view: SchedulerView, queue: WaitingQueue) -> bool:
        """Whether an urgent job decodes, and only less urgent jobs wait for a prefill."""
        if not self._share or view.batch_is_full:
            return False
        best = min(self._levels(view.running), default=_NO_LEVEL)
        if best > _URGENT or min(self._levels(view.chunked_jobs), default=_NO_LEVEL) <= best:
            return False
        has_slot = queue.has_slot(view)
        return not any(
            self.level(job) <= best and job not in view.swapped and has_slot(job)
            for job in self._urgent
        )

    def _levels(self, jobs: Iterable[Job]) -> Iterator[int]:
        return map(self.level, jobs)
