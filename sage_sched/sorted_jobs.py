"""Keeps waiting jobs sorted."""

from __future__ import annotations

import math
from collections.abc import Callable

from sage_sched.job import Job

# Level, key and arrival.
Place = tuple[float, float, int]
Entry = tuple[float, float, int, Job]


class SortedJobs:
    """Jobs in order: ranked jobs and jobs that go first, and the other jobs by arrival."""

    def __init__(self) -> None:
        self.ranked: list[Entry] = []
        self.unranked: list[Entry] = []

    def of(self, job: Job) -> list[Entry]:
        """Return the list that the job's entry belongs to."""
        return self.ranked if job.is_ranked or job.goes_first else self.unranked

    def copy(self) -> SortedJobs:
        copy = SortedJobs()
        copy.ranked, copy.unranked = [*self.ranked], [*self.unranked]
        return copy


class Walk:
    """Goes through sorted jobs by level. Within a level, jobs that go first come by arrival, then
    the others by key and arrival.

    A job that the policy cannot rank waits for as many other jobs as waited when it arrived, as
    under first come, first served. Its place is the length of the queue less the number of jobs
    that have arrived since. So the order depends only on which jobs wait, not on the queue's
    previous order, which may differ between tensor-parallel ranks.
    """

    def __init__(
        self,
        jobs: SortedJobs,
        first_arrival: int,
        moving: Callable[[int], Entry | None] | None = None,
        num_ahead: Callable[[Entry, Entry], int] | None = None,
    ) -> None:
        """Walk through these jobs.

        moving: returns a ranked job that is not among the sorted ones, by its number in order.
        num_ahead: if these jobs are only a part of the queue, returns how many jobs of the whole
            queue go before both a ranked and an unranked one.
        """
        self._ranked, self._unranked = jobs.ranked, jobs.unranked
        self.first_arrival = first_arrival
        self._moving = moving
        self._num_ahead = num_ahead
        self._num_ranked = self._num_unranked = self._num_moving = 0

    def next(self) -> Entry | None:
        ranked = None
        if self._num_ranked < len(self._ranked):
            ranked = self._ranked[self._num_ranked]
        moves = False
        if self._moving is not None:
            moving = self._moving(self._num_moving)
            if moving is not None and (ranked is None or moving < ranked):
                ranked, moves = moving, True
        if self._num_unranked < len(self._unranked):
            unranked = self._unranked[self._num_unranked]
            if ranked is None or self._goes_first(unranked, ranked):
                self._num_unranked += 1
                return unranked
        if moves:
            self._num_moving += 1
        elif ranked is not None:
            self._num_ranked += 1
        return ranked

    def _goes_first(self, unranked: Entry, ranked: Entry) -> bool:
        if unranked[0] != ranked[0]:
            return unranked[0] < ranked[0]
        if ranked[1] == -math.inf:
            return False
        num_ahead = self._num_ranked + self._num_moving + self._num_unranked
        if self._num_ahead is not None:
            num_ahead = self._num_ahead(ranked, unranked)
        return unranked[2] - self.first_arrival <= num_ahead
