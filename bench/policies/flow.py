"""Flow control (arXiv 2604.11001): how fast requests become active, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sage_sched.fields import MOST, require_within
from sage_sched.job import Job
from sage_sched.policies.fcfs_fill import FcfsFill
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView

# Requests that have ended count by halves, the latest most.
_MEMORY = 64


@dataclass(frozen=True, slots=True)
class FlowParameters:
    """share: of the KV pool that the active ones are to fill; the paper's budget, to be tuned."""

    share: float = 1.0

    def __post_init__(self) -> None:
        require_within("policy.flow.share", self.share, 1e-3, MOST)


class Flow(FcfsFill):
    """First come, first served, and the last to come is the first to leave. Requests start at the
    rate at which their KV fills a share of the pool: those that have ended held k token-steps on
    average, so share * pool / k start a step. The paper sets a number of tokens a step by hand."""

    Parameters = FlowParameters

    def __init__(self, parameters: Any, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self._running: dict[Job, int] = {}
        self._held = 0.0  # token-steps of a request; 0: none has ended
        self._credit = 0.0
        self._open: set[Job] = set()
        self._held_back: set[Job] = set()

    def on_pass(self, view: SchedulerView) -> None:
        """Learn from those that have ended, and choose who may start."""
        there = {*view.running, *view.waiting}
        for job in self._running.keys() - there:
            num_steps = job.generated_tokens
            held = num_steps * (job.input_tokens + num_steps / 2)
            self._held += (held - self._held) / (_MEMORY if self._held else 1)
        grown = [job.generated_tokens - self._running.get(job, math.inf) for job in view.running]
        started = sum(job not in self._running and job in self._open for job in view.running)
        rate = self.parameters.share * self.server.kv_pool_tokens / max(1.0, self._held)
        self._credit = min(8.0, self._credit + rate * max(0.0, *grown, 0.0)) - started
        self._running = {job: job.generated_tokens for job in view.running}
        fresh = sorted((job.arrival, job) for job in view.waiting if not job.generated_tokens)
        num_open = len(fresh) if not self._held else max(0, int(self._credit))
        self._open = {job for _, job in fresh[:num_open]}
        self._held_back = {job for _, job in fresh[num_open:]}

    def key(self, job: Job, view: SchedulerView) -> float:
        """Held back until it may start."""
        return math.inf if job in self._held_back else 0.0
