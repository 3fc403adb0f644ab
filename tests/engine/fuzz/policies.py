"""Policies for the fuzzer: each does what none of ours does."""

from __future__ import annotations

import math
from pathlib import Path

from bench.engines.server import plugins
from bench.policies.fastserve import FastServe
from sage_sched.app.registry import ENTRY_POINT_GROUP
from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.policy import Traits
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import MovingKeys, WaitingQueue

# The served work of a phase.
_PHASE_TOKENS = 96
_BUDGETS = (
    None, Budget(prefill_tokens=0), Budget(prefill_tokens=48), Budget(chunk_tokens=20),
    Budget(prefill_tokens=1, chunk_tokens=1),
)  # fmt: skip


class Picky(FastServe):
    """FastServe that serves some requests by arrival alone."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return float(job.arrival) if job.input_tokens % 3 == 0 else super().key(job, view)


class Fickle(FastServe):
    """FastServe with another budget in each phase. It also holds some requests back."""

    traits = Traits(moving=MovingKeys)

    def key(self, job: Job, view: SchedulerView) -> float:
        held_back = (job.arrival + _phase(view)) % 4 == 0
        return math.inf if held_back else super().key(job, view)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        # A request that is held back while it waits is not preempted first while it runs.
        return FastServe.key(self, waiting, view) < FastServe.key(self, running, view)

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        return _BUDGETS[_phase(view) % len(_BUDGETS)]


def _phase(view: SchedulerView) -> int:
    return view.served_tokens // _PHASE_TOKENS


def install(folder: Path) -> dict[str, str]:
    """Return the environment of servers that know both, as picky and fickle."""
    plugins.install_as(folder, "picky", f"{__name__}:Picky", ENTRY_POINT_GROUP)
    return plugins.install_as(folder, "fickle", f"{__name__}:Fickle", ENTRY_POINT_GROUP)
