"""Implements makespan, which ends the last answer of a closed batch as soon as possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from sage_sched.distribution import Floats, LengthDistribution
from sage_sched.job import Job
from sage_sched.plan import Budget, NextPlan
from sage_sched.policy import Policy, Traits
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue

# A key is computed again when an answer has grown by this many tokens.
_INTERVAL_TOKENS = 64
# All keys are computed again when the batch turns out larger by this factor.
_SCALE_STEP = 1.1
# A batch has ended when its work has shrunk by this many scale steps, to a 45th (1.1 ** 40 is 45).
# Some work may be left, because interactive requests may go on.
_NEXT_BATCH_STEPS = 40


@dataclass(frozen=True, slots=True)
class MakespanParameters:
    """Settings of makespan."""

    risk: Annotated[float, Meta(ge=0, le=1000)] = 10.0
    """Extra weight of the jobs that may end last. At 0 all count alike."""


@dataclass(slots=True)
class _Outlook:
    """The prediction for a job, at its age in whole intervals.

    lengths, weights: the distribution of the answer's length, above its age.
    left_tokens: the mean rest of the answer. work: the share of the server that these tokens take,
        in decode steps of the whole server.
    rate, log_need: the rate, and the logarithm of E[exp(rate * R)] at it (see Makespan).
    """

    lengths: Floats
    weights: Floats
    age_tokens: int = -1
    left_tokens: float = 0.0
    work: float = 0.0
    rate: float = -1.0
    log_need: float = 0.0


class Makespan(Policy):
    """Orders a batch so that its last answer comes early, though no length is known for sure.

    Let C be the time at which a job ends, in decode steps. Then `log(sum of exp(rate * C)) / rate`
    is a soft maximum of all C. If a job with R steps left waits for one more step, the sum grows in
    proportion to E[exp(rate * R)]. In that step the job would take a share of the server: one slot,
    and its KV of the pool. So the jobs that lower the sum most come first:

        key = share / E[exp(rate * R) | the answer is longer than its age]

    Jobs that may be long start first. A job without tokens takes little memory, so jobs that may be
    long are found early, even if nothing in their prompts shows it. A job that has outlived its
    prediction counts as long. A job near its end waits when memory runs out.

    `rate` is `risk` divided by the steps that the whole batch takes in a full server. A larger rate
    cares only for the longest job, a smaller one only for memory.

    While slots are the scarce resource, starts wait until several are free, because a prefill step
    delays every running job. A job of a better priority does not wait.

    No client waits for a single answer of a batch, so a job may stay swapped out without limit.
    """

    Parameters = MakespanParameters
    traits = Traits(bounds_time_away=False)

    def __init__(self, parameters: MakespanParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self._num_jobs = 0
        self._work = 0.0
        self._left_tokens = 0.0
        self._scale = 0
        self._rate = self._rate_of_order = 0.0

    def rank(self, job: Job) -> None:
        """Note that a job has arrived. Its key depends on neither step times nor cached tokens."""
        if isinstance(job.memo, _Outlook):
            return
        self._num_jobs += 1
        known = self._known(job)
        job.memo = _Outlook(known.lengths.astype(np.float64), known.weights)
        self._look(job)
        self._rescale()

    def on_end(self, job: Job, now_s: float) -> None:
        if not isinstance(job.memo, _Outlook):
            return
        self._forget(job)
        self._num_jobs -= 1
        if not self._num_jobs:
            self._scale, self._work, self._left_tokens = 0, 0.0, 0.0
            self._rate_of_order = 0.0

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        for job in view.running:
            if isinstance(job.memo, _Outlook):
                self._look(job)
        self._rescale()
        if self._rate != self._rate_of_order:
            # The queue ranks its jobs again, some in each plan. Until then their old keys stand.
            queue.revision += self._rate_of_order > 0
            self._rate_of_order = self._rate
        return NextPlan()

    def _rescale(self) -> None:
        scale = math.ceil(math.log(max(self._work, 1.0), _SCALE_STEP))
        if scale > self._scale or scale < self._scale - _NEXT_BATCH_STEPS or not self._rate:
            self._scale = scale
            self._rate = self.parameters.risk / _SCALE_STEP**scale

    def key(self, job: Job, view: SchedulerView) -> float:
        outlook = self._look(job)
        if outlook.rate != self._rate:
            needs = self._rate * (outlook.lengths - outlook.age_tokens)
            most = float(needs.max())
            outlook.rate = self._rate
            outlook.log_need = most + math.log(float(np.exp(needs - most) @ outlook.weights))
        return math.log(self._share(job.input_tokens + job.generated_tokens)) - outlook.log_need

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        """Hold starts back until the cheapest number of slots is free.

        A prefill step of b seconds delays n running jobs. If they end at a rate of f per second,
        starting k at a time costs n b f / k + k / 2 slots, which is smallest at sqrt(2 n b f).
        """
        num_running = len(view.running)
        if not num_running or view.chunked is not None or view.swapped:
            return None
        if (first := next(queue.walk(view), None)) is None:
            return None
        if first.goes_first or any(first.level < job.level for job in view.running):
            return None
        step_time = view.server.step_time
        step_s = step_time.decode_s(num_running, view.running_kv_tokens)
        left_tokens = max(1.0, self._left_tokens / max(1, self._num_jobs))
        together = num_running * math.sqrt(2 * step_time.prefill_base_s / (left_tokens * step_s))
        is_soon = view.free_slots < min(together, num_running / 4, len(view.waiting))
        return Budget(prefill_tokens=0) if is_soon else None

    def _share(self, kv_tokens: float) -> float:
        """Return the share of the server that a job takes with this much KV."""
        return 1 / self.server.max_running_requests + kv_tokens / self.server.kv_pool_tokens

    def _known(self, job: Job) -> LengthDistribution:
        if job.has_fixed_length:
            return LengthDistribution.from_samples([job.max_new_tokens], "hint")
        known = job.distribution
        # An answer longer than all known ones is taken to exceed the longest by the same factor as
        # the longest exceeds the 90th percentile. With a factor of 2 for all, a batch of a real
        # model's answers ended a sixth later (simulated).
        factor = int(known.lengths[-1]) / known.quantile(0.9)
        return known.with_tail(job.max_new_tokens, factor)

    def _look(self, job: Job) -> _Outlook:
        """Return the outlook of a job at its present age."""
        outlook = job.memo
        assert isinstance(outlook, _Outlook)
        age_tokens = job.generated_tokens // _INTERVAL_TOKENS * _INTERVAL_TOKENS
        if outlook.age_tokens == age_tokens:
            return outlook
        is_longer = outlook.lengths > age_tokens
        if is_longer.any():
            weights = outlook.weights[is_longer]
            outlook.lengths, outlook.weights = outlook.lengths[is_longer], weights / weights.sum()
        else:  # the rest is expected to be as long as the answer so far
            end_tokens = max(age_tokens + 1, min(2 * age_tokens, job.max_new_tokens))
            outlook.lengths, outlook.weights = np.array([float(end_tokens)]), np.ones(1)
        outlook.age_tokens, outlook.rate = age_tokens, -1.0
        left = outlook.lengths - age_tokens
        kv_tokens = job.input_tokens + (age_tokens + outlook.lengths) / 2
        self._forget(job)
        outlook.left_tokens = float(left @ outlook.weights)
        outlook.work = float(
            outlook.left_tokens / self.server.max_running_requests
            + (left * kv_tokens) @ outlook.weights / self.server.kv_pool_tokens
        )
        self._left_tokens += outlook.left_tokens
        self._work += outlook.work
        return outlook

    def _forget(self, job: Job) -> None:
        """Subtract the job's work from the batch's."""
        outlook = job.memo
        assert isinstance(outlook, _Outlook)
        self._left_tokens -= outlook.left_tokens
        self._work -= outlook.work
        outlook.left_tokens = outlook.work = 0.0
