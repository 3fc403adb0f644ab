"""SGLang's own policies, as jobs see them: managers/schedule_policy.py of 0.5.23.

Not in sage_sched's registry: a server runs SGLang's code for these names. Prompts share no
prefixes here, so what a request finds in the radix tree is its own, after a retraction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from bench.simulator.request import Progress
from sage_sched.job import Job

# SGLang's WAITING_QUEUE_PREFIX_MATCH_MAX: a longer queue is not sorted by lpm and hrrn.
_LONGEST_SORTED = 128


class StockPolicy(ABC):
    """An order by SGLang.

    A job that is queued again after a retraction counts as a new arrival (SGLang appends it and
    takes its times anew), with a part of its prompt cached.
    """

    # hrrn's clock, see HrrnPolicy.
    counts_stale_prefill: ClassVar[bool] = False

    @abstractmethod
    def key(self, job: Job, served_tokens: int) -> float:
        """The place of a waiting job: smaller goes first, ties by arrival."""

    def on_arrival(self, job: Job) -> bool:
        """A new job, of which nothing is cached."""
        job.memo = 0
        return True

    def requeued(self, job: Job, arrival: int, served_tokens: int) -> None:
        """The job goes back to the end of the queue."""
        job.arrival = arrival
        job.served_at_arrival_tokens = served_tokens

    def cached(self, job: Job, num_tokens: int) -> None:
        """How many of a waiting job's tokens the radix tree has."""
        job.memo = num_tokens

    def sorts(self, queue_length: int) -> bool:
        """Whether a queue of this length is sorted at all."""
        return True

    def chunk_limit(
        self, left_tokens: int, budget_tokens: int, page_size: int, works: Iterable[int]
    ) -> int | None:
        """How much of a pass's budget the chunked request may take; None for all of it.

        left_tokens: what is left of it. works: the uncached tokens of the waiting, in order.
        """
        return None


def _cached_tokens(job: Job) -> int:
    assert isinstance(job.memo, int)
    return job.memo


class FcfsPolicy(StockPolicy):
    """By arrival in the queue."""

    def key(self, job: Job, served_tokens: int) -> float:
        return 0.0


class LpmPolicy(StockPolicy):
    """Longest prefix match: FCFS, but for retracted requests whose prompt is still cached."""

    def key(self, job: Job, served_tokens: int) -> float:
        return -_cached_tokens(job)

    def sorts(self, queue_length: int) -> bool:
        return queue_length <= _LONGEST_SORTED


class HrrnPolicy(StockPolicy):
    """Highest response ratio next: prefill tokens processed since the arrival, by uncached prompt.

    SGLang adds batch.extend_num_tokens to its clock at every forward, and a decode batch keeps
    the count of the prefill batch that it began as (later ones are merged into it), so that each
    decode step adds that many again. Ties by arrival; SGLang takes the random request id.
    """

    counts_stale_prefill: ClassVar[bool] = True

    def key(self, job: Job, served_tokens: int) -> float:
        uncached = job.input_tokens - _cached_tokens(job)
        if uncached <= 0:
            return float("-inf")
        return -max(0, served_tokens - job.served_at_arrival_tokens) / uncached

    def sorts(self, queue_length: int) -> bool:
        return queue_length <= _LONGEST_SORTED


class ShortestPrefillPolicy(StockPolicy):
    """The fewest tokens to prefill first; a long prompt's chunks leave room for shorter ones."""

    def key(self, job: Job, served_tokens: int) -> float:
        return max(1, job.input_tokens + job.generated_tokens - _cached_tokens(job))

    def chunk_limit(
        self, left_tokens: int, budget_tokens: int, page_size: int, works: Iterable[int]
    ) -> int | None:
        if budget_tokens < 2 * page_size:
            return None
        reserved = 0
        for work in works:
            charge = -(-work // page_size) * page_size
            if work >= left_tokens or reserved + charge > budget_tokens - page_size:
                break
            reserved += charge
        return (budget_tokens - reserved) // page_size * page_size if reserved else None


def stock_order(queue: list[Progress], policy: StockPolicy, served_tokens: int) -> list[Progress]:
    """The waiting queue as SGLang sorts it."""
    if not policy.sorts(len(queue)):
        return queue
    return sorted(queue, key=lambda p: (policy.key(p.job, served_tokens), p.job.arrival))


STOCK: dict[str, type[StockPolicy]] = {
    "fcfs": FcfsPolicy,
    "hrrn": HrrnPolicy,
    "lpm": LpmPolicy,
    "shortest-prefill-first": ShortestPrefillPolicy,
}
