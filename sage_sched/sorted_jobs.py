"""Keeps waiting jobs sorted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import merge

from sage_sched.job import Job

# Level, key and arrival.
Place = tuple[float, float, int]
Entry = tuple[float, float, int, Job]
# A level, a class and one of its tenants.
Group = tuple[float, str, str]


def group_of(job: Job) -> Group | None:
    """Return the group whose jobs keep their order, or None if the class does not share fairly."""
    hints = job.hints
    return (job.level, hints.slo_class, hints.tenant) if hints.shares_fairly else None


class SortedJobs:
    """Jobs in two sorted lists: ranked jobs and jobs that go first, and the other jobs by
    arrival."""

    def __init__(self) -> None:
        self.ranked: list[Entry] = []
        self.unranked: list[Entry] = []

    def of(self, job: Job) -> list[Entry]:
        """Return the list that the job's entry belongs to."""
        return self.ranked if job.is_ranked or job.goes_first else self.unranked


def walk(
    jobs: SortedJobs,
    first_arrival: int,
    moving: Iterable[Entry] = (),
    num_ahead: Callable[[Entry, Entry], int] | None = None,
) -> Iterator[Entry]:
    """Return sorted jobs by level. Within a level, jobs that go first come by arrival, then the
    others by key and arrival.

    A job that the policy cannot rank waits for as many other jobs as waited when it arrived, as
    under first come, first served. Its place is the length of the queue less the number of jobs
    that have arrived since. So the order depends only on which jobs wait, not on the queue's
    previous order, which may differ between tensor-parallel ranks.

    first_arrival: the number of arrivals less the length of the queue.
    moving: ranked jobs that are not among the sorted ones, in order.
    num_ahead: if these jobs are only a part of the queue, returns how many jobs of the whole queue
        go before both a ranked and an unranked one.
    """
    either = iter(jobs.ranked or moving)  # a merge takes a while
    both = merge(jobs.ranked, moving) if jobs.ranked and moving else either
    if not jobs.unranked:
        return both
    return _mixed(both, jobs.unranked, first_arrival, num_ahead)


def _mixed(
    both: Iterator[Entry],
    unranked_jobs: Iterable[Entry],
    first_arrival: int,
    num_ahead: Callable[[Entry, Entry], int] | None,
) -> Iterator[Entry]:
    """Yield ranked jobs and unranked ones, see walk."""
    others = iter(unranked_jobs)
    ranked, unranked = next(both, None), next(others, None)
    number = 0

    def is_next(unranked: Entry, ranked: Entry) -> bool:
        if unranked[0] != ranked[0]:
            return unranked[0] < ranked[0]
        if ranked[1] == -math.inf:
            return False
        ahead = number if num_ahead is None else num_ahead(ranked, unranked)
        return unranked[2] - first_arrival <= ahead

    while ranked or unranked:
        if unranked and (ranked is None or is_next(unranked, ranked)):
            yield unranked
            unranked = next(others, None)
        elif ranked:
            yield ranked
            ranked = next(both, None)
        number += 1
