"""Serves the job with the smallest Gittins index first (SageSched), with a TTFT target and a
starvation bound."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated

from msgspec import Meta

from sage_sched.index import Indices
from sage_sched.job import Job
from sage_sched.plan import MOST_TOGETHER, WINDOW, NextPlan
from sage_sched.policy import Policy, Traits
from sage_sched.session_returns import SessionReturns
from sage_sched.steps import ServerFacts, StepTime
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue

# Added to the key of a held job. Logarithms of indices are far smaller.
_BEHIND = 1e3


@dataclass(frozen=True, slots=True)
class SageParameters:
    """Settings of `sage`."""

    ttft_ms: Annotated[float, Meta(ge=0)] = 2000.0
    """TTFT target. New requests wait up to it, or to their own deadline, so that they are prefilled
    together. If memory is full, running requests with a larger Gittins index are swapped out. Long
    prompts are ordered by their index alone. `inf`: no target."""
    regret: Annotated[float, Meta(ge=0)] = 32.0
    """Starvation bound: after a request arrives, the work for later requests may reach `regret`
    times the work for earlier ones plus a batch. Then no request overtakes it. `inf`: no bound."""


class Sage(Policy):
    """Serves the job with the smallest Gittins index of the predicted cost first (SageSched,
    section 3.3).

    The index of a new request uses its whole length distribution. Once it has generated tokens, the
    index uses only lengths above their number.

    New requests start together, in time for a TTFT target (Starts). Until its start is
    due, a new request is ordered behind all others. Then its key is the logarithm of its index or
    of the price of its start, whichever is smaller, and running requests with a larger index are
    preempted for it. Other requests preempt only if they have passed the starvation bound or the
    swap-out bound. A running request with a TPOT target is not preempted for a start.
    """

    Parameters = SageParameters
    traits = Traits(
        predicts_waits=True,
        retention=SessionReturns,
        preempts_for_starts=True,
        # No limit is needed, because a request preempts others only while its start is due or if it
        # has passed a bound. With a limit, long requests that reached it would fill the memory.
        max_preemptions=sys.maxsize,
    )

    def __init__(self, parameters: SageParameters, server: ServerFacts) -> None:
        self._indices = Indices(server)
        super().__init__(parameters, server, self._indices)
        ttft_s = parameters.ttft_ms / 1e3
        has_target = ttft_s < math.inf
        self.traits = replace(
            type(self).traits,
            starts_within_s=ttft_s if has_target else 0.0,
            regret=parameters.regret,
        )
        self._starts = Starts(ttft_s, self._indices)

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        self._starts.follow(queue)
        self._starts.update(view)
        return NextPlan(self._starts.next_s)

    def enters_full_at_s(self, job: Job) -> float:
        return self._starts.came(job, self.server.step_time)

    def key(self, job: Job, view: SchedulerView) -> float:
        """Return the logarithm of the job's index, or of its price if its start is due. A held job
        is behind all others."""
        log_index, starts = self._indices.of(job).log_index, self._starts
        if job in starts.held:
            return log_index + _BEHIND
        return min(log_index, starts.due.get(job, math.inf))

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        if running.hints.tpot_slo_ms is not None or not waiting.starts_now:
            return False
        return math.exp(self.key(waiting, view)) + price_s < self._indices.of(running).index


class Starts:
    """Starts jobs together, in time for a TTFT target, at a price.

    A first token in time is worth as much as a finished answer. It costs the job's own prefill and
    its share of the prefill step, in seconds of the server:

        price = prefill of its uncached tokens + fixed time of a prefill step / jobs that start

    While its start is due, a job is ordered by the smaller of its price and its Gittins index. A
    running job is preempted for it if the running job's own index is larger than that by more than
    the time to move its KV.

    A job's own deadline is its target if it comes sooner (Job.ttft_s).

    Until their start is due, jobs without a first token are held: they are ordered behind all
    others. Meanwhile, preempted jobs resume without a prefill step. A prefill step delays every
    running job by its fixed time b, and holding a job delays that job. If each delay is divided by
    the length of the answer, as in slowdown, the sum of delays is smallest if the jobs start as
    soon as

        sum over held jobs of (time waited / length)  >=  b * sum over running jobs of (1 / length)

    (the economic order quantity, Harris 1913), and before the first of them would be late. A job
    that can no longer be in time, or whose prompt is too long (StepTime.longest_start_s), is
    ordered by its index alone.

    Starts are not held while no job runs, or if running jobs cannot be preempted.
    """

    def __init__(self, ttft_s: float, indices: Indices) -> None:
        """Make a rule for ttft_s, the target in seconds from a request's arrival; inf: none."""
        self._ttft_s = ttft_s
        self._indices = indices
        # Waiting jobs without a first token that can still be in time.
        self._fresh: dict[Job, None] = {}
        self.held: set[Job] = set()
        # Jobs whose start is due, with the logarithm of their price.
        self.due: dict[Job, float] = {}
        self.next_s = math.inf
        # When held jobs start; None if new jobs are not held, or some are due.
        self._start: _Start | None = None

    def follow(self, queue: WaitingQueue) -> None:
        """Note which jobs wait. Jobs that keep their memory after their answers, and jobs of
        batches, do not start early."""
        if self._ttft_s == math.inf:
            return
        for job in queue.left:
            self._fresh.pop(job, None)
            self.held.discard(job)
            self.due.pop(job, None)
            job.starts_now = False
        for job in queue.came:
            if not (job.generated_tokens or job.keeps_memory or job.batch):
                self._fresh[job] = None

    def update(self, view: SchedulerView) -> None:
        """Decide which jobs are held, which start, and when to look again (next_s)."""
        held, due = self.held, self.due
        self.held, self.due, self.next_s, self._start = set(), {}, math.inf, None
        try:
            if view.running and view.may_preempt:
                self._gather(view)
        finally:
            for job in {*held, *due, *self.held, *self.due}:
                if (job in held, due.get(job)) != (job in self.held, self.due.get(job)):
                    job.starts_now = job in self.due
                    job.changes()

    def _gather(self, view: SchedulerView) -> None:
        step_time, now_s = view.server.step_time, view.now_s
        decode_s = step_time.decode_s(len(view.running), view.running_kv_tokens)
        step_s = step_time.prefill_base_s + decode_s
        prompts_s = self._in_time(now_s + step_s, view)
        costs = step_time.prefill_base_s * sum(self._weights(view.running))
        start = _Start(costs, step_s + decode_s)
        for (job, prompt_s), weight in zip(
            prompts_s.items(), self._weights(prompts_s), strict=True
        ):
            start.add(job.arrival_s, self._within_s(job), weight, prompt_s)
        if now_s < start.due_s:
            self.held.update(prompts_s)
            self.next_s, self._start = min(self.next_s, start.due_s), start
            return
        self.next_s = now_s  # until all have started
        shared_s = step_time.prefill_base_s / min(len(prompts_s), WINDOW)
        for job, prompt_s in prompts_s.items():
            self.due[job] = math.log(max(1e-9, shared_s + prompt_s))

    def _in_time(self, first_s: float, view: SchedulerView) -> dict[Job, float]:
        """Return the seconds of prefill of each job that can still be in time, and whose prompt is
        not too long; drop the other jobs.

        first_s: when a prefill step without tokens would end.
        """
        found, late = {}, []
        longest_s = view.server.step_time.longest_start_s(self._ttft_s)
        for job in islice(self._fresh, MOST_TOGETHER):
            cached_tokens = job.cached_input_tokens
            new_tokens = job.input_tokens - cached_tokens
            if new_tokens <= 0:  # prefilled on another server: there is no step to share
                late.append(job)
                continue
            prompt_s = float(view.server.step_time.prompt_s(cached_tokens, new_tokens))
            due_s = job.arrival_s + self._within_s(job)
            if first_s + prompt_s < due_s and prompt_s < longest_s:
                if not job.goes_first:
                    found[job] = prompt_s
            elif job.was_looked_up or first_s >= due_s:
                late.append(job)
            else:  # late or too long, unless some of it is cached, which this plan looks up
                self.next_s = view.now_s
        for job in late:
            del self._fresh[job]
        return found

    def came(self, job: Job, step_time: StepTime) -> float:
        """Return when the held jobs start now that this one has come, by SchedulerView.now_s; inf
        if it starts by its index alone, and -inf if a plan has to look at it."""
        cached_tokens = job.cached_input_tokens
        new_tokens = job.input_tokens - cached_tokens
        if self._ttft_s == math.inf or job.keeps_memory or new_tokens <= 0:
            return math.inf
        prompt_s = float(step_time.prompt_s(cached_tokens, new_tokens))
        if self._start is None or prompt_s >= step_time.longest_start_s(self._ttft_s):
            return -math.inf
        (weight,) = self._weights([job])
        self._start.add(job.arrival_s, self._within_s(job), weight, prompt_s)
        return self._start.due_s

    def _within_s(self, job: Job) -> float:
        """Return the target of a job, in seconds from its arrival."""
        return min(self._ttft_s, job.ttft_s)

    def _weights(self, jobs: Iterable[Job]) -> list[float]:
        """Return the inverses of the expected lengths of the jobs' answers."""
        return [1.0 / length if length > 1.0 else 1.0 for length in self._indices.lengths(jobs)]


@dataclass(slots=True)
class _Start:
    """The time at which held jobs start (Starts).

    costs: the delay of running jobs, divided by their lengths; later the weighted arrival times of
        the held jobs are added. steps_s: the seconds of steps before and after their prefill.
    """

    costs: float
    steps_s: float
    weight: float = 0.0
    target_s: float = math.inf
    prompts_s: float = 0.0

    def add(self, arrival_s: float, within_s: float, weight: float, prompt_s: float) -> None:
        """Hold a job that counts by this weight."""
        self.costs += weight * arrival_s
        self.weight += weight
        self.target_s = min(self.target_s, arrival_s + within_s)
        self.prompts_s += prompt_s

    @property
    def due_s(self) -> float:
        """Return the time, by SchedulerView.now_s: as soon as the sum of time waited / length
        reaches the costs, and before the first of them would be late. inf: none is held."""
        if not self.weight:
            return math.inf
        return min(self.costs / self.weight, self.target_s - self.steps_s - self.prompts_s)
