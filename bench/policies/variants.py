"""Our policies with one thing changed or left out."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.urgency import Urgency
from sage_sched.view import SchedulerView


class UrgencyOrder(Urgency):
    """urgency without preemption."""

    should_preempt = Policy.should_preempt


class UrgencyArrival(Urgency):
    """urgency, with the jobs of a bucket in order of arrival."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._bucket(job)
