"""The order of jobs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby

from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView

# Level, key and arrival.
Place = tuple[float, float, int]


def serving_order(policy: Policy, view: SchedulerView) -> list[int]:
    """The positions of the waiting jobs in the order in which to serve them: by level; within a
    level promised jobs by arrival, then the others by key and arrival.

    A job that the policy cannot rank waits for as many others as waited when it came, as under
    first come, first served: its place is the length of the queue less the number of jobs that
    have come since. So the order depends only on who waits, not on the queue's previous order,
    which may differ between tensor-parallel ranks.
    """
    jobs = view.waiting
    places = _places(jobs, policy, view)
    order = sorted(range(len(jobs)), key=places.__getitem__)
    if not [job for job in jobs if not job.is_ranked]:  # a list is quicker than all()
        return order
    mixed: list[int] = []
    first_arrival = view.num_arrivals - len(jobs)
    for _, of_level in groupby(order, lambda position: places[position][0]):
        level = [*of_level]
        end = len(mixed) + len(level)
        mixed += [position for position in level if jobs[position].is_promised]
        others = [position for position in level if not jobs[position].is_promised]
        ranked = iter([position for position in others if jobs[position].is_ranked])
        unranked = deque(position for position in others if not jobs[position].is_ranked)
        while len(mixed) < end:
            if unranked and jobs[unranked[0]].arrival - first_arrival <= len(mixed):
                mixed.append(unranked.popleft())
            elif (position := next(ranked, None)) is not None:
                mixed.append(position)
            else:
                mixed.extend(unranked)
    return mixed


def retention_order(
    jobs: Sequence[Job], default: Sequence[int], policy: Policy, view: SchedulerView
) -> list[int]:
    """The positions of running jobs, from the first to keep to the first to retract.

    default: SGLang's own order of them. A job that the policy cannot rank keeps its place in it,
        within its level and behind the promised ones.
    """
    rank_anew(jobs, policy)
    places = _places(jobs, policy, view)
    order: list[int] = []
    for level in sorted({job.level for job in jobs}):
        same = [p for p in default if jobs[p].level == level]
        order += sorted((p for p in same if jobs[p].is_promised), key=places.__getitem__)
        others = [p for p in same if not jobs[p].is_promised]
        ranked = iter(sorted((p for p in others if jobs[p].is_ranked), key=places.__getitem__))
        order += [next(ranked) if jobs[p].is_ranked else p for p in others]
    return order


def rank_anew(jobs: Iterable[Job], policy: Policy) -> None:
    """Rank the jobs again that were ranked by older step times."""
    revision = policy.revision
    for job in [job for job in jobs if job.ranked_at != revision]:
        # First, so that a policy that raises costs one pass only.
        job.ranked_at = revision
        job.place = None
        if job.is_ranked:
            policy.on_forecast(job)


def _places(jobs: Sequence[Job], policy: Policy, view: SchedulerView) -> list[Place]:
    """The place of each. Kept until a job's age or revision changes, unless the policy's keys move:
    a queue of a thousand is ordered in every pass."""
    if policy.moves:
        return [place_of(job, policy, view) for job in jobs]
    places = [job.place for job in jobs]
    if None in places:
        for position, job in enumerate(jobs):
            if job.place is None:
                job.place = places[position] = place_of(job, policy, view)
    return places  # type: ignore[return-value]


def place_of(job: Job, policy: Policy, view: SchedulerView) -> Place:
    """The place of a job. One that is held back (Policy.key) is behind those of all levels."""
    if job.is_promised:
        return job.level, -math.inf, job.arrival
    key = policy.key(job, view) if job.is_ranked else 0.0
    if math.isnan(key):  # it would make the order depend on the queue's
        raise ValueError(f"the key of {job} is not a number")
    return math.inf if key == math.inf else job.level, key, job.arrival
