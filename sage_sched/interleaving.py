"""The interface by which tenants take turns within the policy's order of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from sage_sched.job import Job
from sage_sched.limit import Limit
from sage_sched.sorted_jobs import Entry

# A level, a class and one of its tenants.
Group = tuple[float, str, str]


def group_of(job: Job) -> Group | None:
    """Return the group whose jobs keep their order, or None if the class does not share fairly."""
    hints = job.hints
    return (job.level, hints.slo_class, hints.tenant) if hints.shares_fairly else None


class Interleaving(Limit):
    """Keeps the policy's order of jobs. Subclasses follow one waiting queue and may interleave its
    jobs: sage_sched.fairness lets the tenants of a class take turns.
    """

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
        moving: Callable[[], Mapping[Group, Iterator[Entry]]],
        num_ahead: Callable[[Entry, Entry], int],
        skips: Callable[[Job], bool],
    ) -> Iterator[Job]:
        """Yield the jobs in the order in which to serve them, without those that are left out.

        entries: the queue in the policy's order. moving: returns, by group and in order, the
            entries whose keys change while they wait.
        first_arrival, num_ahead: see sage_sched.sorted_jobs.walk.
        skips: whether a job is left out. It is called in the order of the result, because jobs get
            LoRA adapter slots in that order.
        """
        return (entry[3] for entry in entries if not skips(entry[3]))
