"""The waiting queue, kept in the policy's order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from bench.simulator.request import Progress
from bench.simulator.stock import StockPolicy
from sage_sched.policy import Policy
from sage_sched.queue import ranked_order


class WaitingQueue:
    """In the order that ranked_order gives at every scheduling pass.

    Where keys stay as they are while a request waits, that order is kept by insertion; where they
    move, or a request without a key holds its position, the queue is sorted in every pass.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[float, int, Progress]] = []
        self._num_unranked = 0
        self._sorted = True

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Progress]:
        return (entry[2] for entry in self._entries)

    def __getitem__(self, position: int) -> Progress:
        return self._entries[position][2]

    def add(self, progress: Progress, served_tokens: int) -> None:
        """At the end, to be ranked with the others."""
        job = progress.job
        if not progress.ranked:
            self._num_unranked += 1
            self._entries.append((0.0, job.arrival, progress))
        elif self._policy.moves or self._num_unranked or not self._sorted:
            self._sorted = False
            self._entries.append((0.0, job.arrival, progress))
        else:
            insort(self._entries, (self._policy.key(job, served_tokens), job.arrival, progress))

    def keys_changed(self) -> None:
        """What the policy knows of some waiting job has changed."""
        self._sorted = False

    def arrange(self, served_tokens: int) -> None:
        """Rank, at the beginning of a pass."""
        if self._sorted and not self._policy.moves:
            return
        if isinstance(self._policy, StockPolicy) and not self._policy.sorts(len(self)):
            return
        jobs = [progress.job if progress.ranked else None for progress in self]
        order = ranked_order(jobs, self._policy, served_tokens)
        self._entries = [self._keyed(self[position], served_tokens) for position in order]
        self._sorted = True

    def _keyed(self, progress: Progress, served_tokens: int) -> tuple[float, int, Progress]:
        job = progress.job
        key = self._policy.key(job, served_tokens) if progress.ranked else 0.0
        return key, job.arrival, progress

    def drop(self, positions: Sequence[int]) -> None:
        """The requests at these positions, ascending, have been admitted."""
        for position in reversed(positions):
            self._num_unranked -= not self._entries.pop(position)[2].ranked
