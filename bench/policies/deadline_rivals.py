"""The policies that ProServe's paper compares itself with (section 5.1), for the simulator only.

All use our admission, so they know as much about lengths as our policies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from sage_sched.job import Job
from sage_sched.plan import Budget, NextPlan
from sage_sched.policy import Policy, Traits
from sage_sched.slo import Deadlines
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import MovingKeys, WaitingQueue


class SarathiFcfs(Policy):
    """First come, first served, with a token budget per step that keeps the TPOT of a full batch
    (Sarathi: a fixed budget, found by profiling)."""

    traits = Traits(moving=MovingKeys, has_deadlines=True)

    def key(self, job: Job, view: SchedulerView) -> float:
        return 0.0

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        jobs = (*view.running, *view.waiting)
        tpot_s = min((Deadlines.of(job.hints).tpot_s for job in jobs), default=math.inf)
        if tpot_s == math.inf:
            return None
        step_time = self.server.step_time
        full_s = step_time.decode_s(self.server.max_running_requests, self.server.kv_pool_tokens)
        tokens = int((tpot_s - full_s) / step_time.prefill_token_s)
        return Budget(prefill_tokens=max(64, tokens))


class SarathiPriority(SarathiFcfs):
    """Serves classes of larger weight first, with Sarathi's budget."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return -job.hints.weight


class LeastLaxity(SarathiFcfs):
    """Serves the least laxity first: the time to the next token's deadline, less the time that the
    token takes (least laxity first of MindIE), with Sarathi's budget."""

    def key(self, job: Job, view: SchedulerView) -> float:
        due_s = job.arrival_s + Deadlines.of(job.hints).due_s(job.generated_tokens + 1)
        return due_s - self.server.recompute_s(job.input_tokens, job.cached_input_tokens)


class WeightedVtc(SarathiFcfs):
    """Serves the class with the least service per weight first (Sheng et al., OSDI 2024)."""

    def __init__(self, parameters: Any, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self._service = defaultdict[str, float](float)
        # The counted tokens of each job that has run and has not ended.
        self._counted: dict[Job, int] = {}

    def _count(self, job: Job) -> None:
        done_tokens = job.served_tokens + job.generated_tokens
        new_tokens = done_tokens - self._counted.get(job, 0)
        self._counted[job] = done_tokens
        self._service[job.hints.slo_class] += new_tokens / job.hints.weight

    def on_end(self, job: Job, now_s: float) -> None:
        self._count(job)
        del self._counted[job]

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        for job in (*queue.came, *view.running, *view.chunked_jobs):
            self._count(job)
        return NextPlan()

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._service[job.hints.slo_class]


class FairBatching(SarathiFcfs):
    """First come, first served, with as much prefill as the least slack of running requests allows
    (FairBatching: deadlines form an envelope, and tokens ahead of it are slack)."""

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        step_time = self.server.step_time
        slack_s = math.inf
        for job in view.running:
            deadlines = Deadlines.of(job.hints)
            due_s = job.arrival_s + deadlines.due_s(job.generated_tokens + 1)
            slack_s = min(slack_s, max(due_s - view.now_s, deadlines.tpot_s))
        if slack_s == math.inf:
            return None
        taken_s = step_time.mixed_s(1, 0, 0, len(view.running), view.running_kv_tokens)
        tokens = int((slack_s - taken_s) / step_time.prefill_token_s)
        return Budget(prefill_tokens=max(64, min(tokens, 1 << 20)))


RIVALS: dict[str, type[Policy]] = {
    "sarathi-fcfs": SarathiFcfs,
    "sarathi-priority": SarathiPriority,
    "least-laxity": LeastLaxity,
    "weighted-vtc": WeightedVtc,
    "fairbatching": FairBatching,
}
