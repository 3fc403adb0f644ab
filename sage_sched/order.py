"""Orders waiting and running jobs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from sage_sched.followed import HEAD, HEAD_IF_FULL
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import place_of


def most_ordered(view: SchedulerView) -> int:
    """Return how many jobs a plan orders at most."""
    return HEAD_IF_FULL if view.batch_is_full else HEAD


def serving_order(policy: Policy, view: SchedulerView) -> list[int]:
    """Return the positions of the waiting jobs in the order in which to serve them, at most
    most_ordered."""
    line = policy.queue
    line.follow(view, policy)
    line.settle(view, policy)
    return [line.positions.of(job) for job in islice(line.walk(view, policy), most_ordered(view))]


def retention_order(
    jobs: Sequence[Job], default: Sequence[int], policy: Policy, view: SchedulerView
) -> list[int]:
    """Return the positions of running jobs, from the first to keep to the first to retract.

    default: SGLang's own order of them. A job that the policy cannot rank keeps its place in it,
        within its level and behind the jobs that go first. Pinned jobs (Job.is_pinned) come before
        all others.
    """
    places = [place_of(job, policy, view) for job in jobs]
    order = sorted((p for p in default if jobs[p].is_pinned), key=places.__getitem__)
    for level in sorted({job.level for job in jobs}):
        same = [p for p in default if jobs[p].level == level and not jobs[p].is_pinned]
        order += sorted((p for p in same if jobs[p].goes_first), key=places.__getitem__)
        others = [p for p in same if not jobs[p].goes_first]
        ranked = iter(sorted((p for p in others if jobs[p].is_ranked), key=places.__getitem__))
        order += [next(ranked) if jobs[p].is_ranked else p for p in others]
    return order
