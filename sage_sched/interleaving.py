"""The order among requesters, on top of the policy's order among jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sage_sched.job import Job
from sage_sched.sorted_jobs import Entry
from sage_sched.view import SchedulerView


class Interleaving:
    """Follows one waiting queue, and may interleave its jobs. This one keeps their order.

    sage_sched.fairness lets the tenants of a class take turns.
    """

    def look(self, view: SchedulerView) -> None:
        """Note that a pass is about to order the jobs."""

    def joined(self, job: Job) -> None:
        """Note that a job has joined the queue."""

    def left(self, job: Job) -> None:
        """Note that a job has left the queue."""

    def placed(self, entry: Entry) -> None:
        """Note that the queue has put a job in its place."""

    def taken_out(self, entry: Entry) -> None:
        """Note that the queue has taken a job out of its place."""

    def in_turns(
        self,
        entries: Iterable[Entry],
        first_arrival: int,
        moving: Iterable[Entry],
        num_ahead: Callable[[Entry, Entry], int],
        skips: Callable[[Job], bool],
    ) -> Iterator[Job | None]:
        """Yield the jobs in the order in which to serve them, or None for a job that is left out.

        entries: in the policy's order. moving: the part of them whose keys move.
        first_arrival, num_ahead: see sage_sched.sorted_jobs.walk.
        skips: whether a job is left out; asked in the order of the result, because adapter slots
            are given in that order.
        """
        return (None if skips(entry[3]) else entry[3] for entry in entries)
