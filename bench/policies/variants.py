"""Defines our policies with one thing changed or left out. The variants of ProServe (its Fig. 15)
are only simulated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.policy import Policy, Traits
from sage_sched.slo import Proserve
from sage_sched.urgency import Urgency
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue


class UrgencyOrder(Urgency):
    """The policy urgency without preemption."""

    should_preempt = Policy.should_preempt


class UrgencyArrival(Urgency):
    """The policy urgency with the jobs of a bucket in order of arrival."""

    traits = Traits()

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._bucket(job)


class OnlyDeadline(Proserve):
    """Orders all requests by deadline."""

    def _by_density(self, urgent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.zeros_like(urgent)


class OnlyDensity(Proserve):
    """Orders all requests by density."""

    def _by_density(self, urgent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.ones_like(urgent)


class NotLatencyAware(Proserve):
    """Runs batches of SGLang's size, regardless of their time."""

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        return None


PARTS: dict[str, type[Policy]] = {
    "proserve-deadline": OnlyDeadline,
    "proserve-density": OnlyDensity,
    "proserve-unaware": NotLatencyAware,
}
