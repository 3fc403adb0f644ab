"""Implements SGLang's own policies for simulated jobs, after managers/schedule_policy.py of 0.5.23.

They are not in sage_sched's registry: a server runs SGLang's code for these names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from bench.simulator.pool import KvPool
from bench.simulator.request import Progress
from sage_sched.job import Job

# SGLang's WAITING_QUEUE_PREFIX_MATCH_MAX: a longer queue is not sorted by lpm and hrrn.
_LONGEST_SORTED = 128
# SGLang's two IN_BATCH_PREFIX_CACHING_..._THRESHOLD. If prompts have at most this many cached
# tokens and share a prefix of at least this length, all but the first wait until the first is
# cached.
_SHARED_TOKENS = 32
_LAST = 1e15


class StockPolicy(ABC):
    """One of SGLang's orders of the waiting queue.

    A retracted job counts as a new arrival (SGLang appends it to the queue and resets its times).

    asks_tree: whether it orders by the cached prefix of waiting jobs.
    longest_sorted: a longer queue is not sorted.
    """

    # hrrn's clock, see HrrnPolicy.
    counts_stale_prefill: ClassVar[bool] = False
    asks_tree: ClassVar[bool] = False
    longest_sorted: ClassVar[float] = math.inf

    @abstractmethod
    def key(self, job: Job, served_tokens: int) -> float:
        """Return the place of a waiting job: smaller goes first, ties by arrival."""

    def arrived(self, job: Job) -> None:
        """Take in a new job, of which no cached tokens are known."""
        job.memo = Found(0)

    def requeued(self, job: Job, arrival: int, served_tokens: int) -> None:
        """Move the job to the end of the queue."""
        job.arrival = arrival
        job.served_at_arrival_tokens = served_tokens

    def chunk_limit(
        self, left_tokens: int, budget_tokens: int, page_size: int, works: Iterable[int]
    ) -> int | None:
        """Return how many tokens of a pass's budget the chunked request may take; None for all.

        left_tokens: its remaining tokens.
        works: the uncached tokens of the waiting jobs, in order.
        """
        return None


class Reserve(NamedTuple):
    """The memory that SGLang's own admission keeps free: the cap of each waiting request, and for
    each running one a share of the rest of its cap (PrefillAdder, managers/schedule_policy.py).

    share: see bench.simulator.state.NewTokenRatio. clip_tokens: see Engine.clip_max_new_tokens.
    """

    share: float
    clip_tokens: int
    page_size: int

    def left_tokens(self, job: Job) -> int:
        """Return how many more tokens of an answer SGLang expects at most."""
        return min(job.max_new_tokens - job.generated_tokens, self.clip_tokens)

    def needed_tokens(self, job: Job) -> int:
        """Return the tokens of the KV pool that a waiting job needs."""
        filled = job.input_tokens + job.generated_tokens
        return filled + self.left_tokens(job) + self.page_size

    def set_aside_tokens(self, running: Sequence[Job]) -> list[float]:
        """Return the tokens of the KV pool to keep free for each running job."""
        return [self.left_tokens(job) * self.share for job in running]


class Found(NamedTuple):
    """The cached tokens of a waiting job, and whether it waits for a job with the same prefix."""

    cached_tokens: int
    waits: bool = False


def _found(job: Job) -> Found:
    assert isinstance(job.memo, Found)
    return job.memo


class FcfsPolicy(StockPolicy):
    """First come, first served."""

    def key(self, job: Job, served_tokens: int) -> float:
        return 0.0


class LpmPolicy(StockPolicy):
    """Longest cached prefix first. Without shared prefixes, only retracted requests have a cached
    prefix."""

    asks_tree: ClassVar[bool] = True
    longest_sorted: ClassVar[float] = _LONGEST_SORTED

    def key(self, job: Job, served_tokens: int) -> float:
        cached_tokens, waits = _found(job)
        return _LAST if waits else -cached_tokens


class HrrnPolicy(StockPolicy):
    """Highest response ratio next: prefill tokens since the arrival per uncached prompt token.

    SGLang adds batch.extend_num_tokens to its clock at every forward. A decode batch begins as a
    prefill batch, into which later ones are merged. It keeps the count of that first batch, so each
    decode step adds it again. Here ties are broken by arrival, in SGLang by the random request id.
    """

    counts_stale_prefill: ClassVar[bool] = True
    asks_tree: ClassVar[bool] = True
    longest_sorted: ClassVar[float] = _LONGEST_SORTED

    def key(self, job: Job, served_tokens: int) -> float:
        cached_tokens, waits = _found(job)
        if waits:
            return _LAST
        uncached = job.input_tokens - cached_tokens
        if uncached <= 0:
            return float("-inf")
        return -max(0, served_tokens - job.served_at_arrival_tokens) / uncached


class ShortestPrefillPolicy(StockPolicy):
    """The fewest tokens to prefill first; a long prompt's chunks leave room for shorter ones."""

    asks_tree: ClassVar[bool] = True

    def key(self, job: Job, served_tokens: int) -> float:
        cached_tokens, waits = _found(job)
        work = max(1, job.input_tokens + job.generated_tokens - cached_tokens)
        return work + (_LAST if waits else 0.0)

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


def stock_order(
    queue: list[Progress], policy: StockPolicy, served_tokens: int, pool: KvPool
) -> list[Progress]:
    """Return the waiting queue as SGLang sorts it."""
    if len(queue) > policy.longest_sorted:
        return queue
    if policy.asks_tree:
        _look_up(queue, pool)
    return sorted(queue, key=lambda p: (policy.key(p.job, served_tokens), p.job.arrival))


def _look_up(queue: Sequence[Progress], pool: KvPool) -> None:
    """Look up each request's cached prefix, as SGLang's _compute_prefix_matches does."""
    beginnings = set()
    for progress in queue:
        cached_tokens, waits = pool.found_tokens(progress), False
        if cached_tokens <= _SHARED_TOKENS:
            stream, first, end = progress.sequence()[0]
            waits = (stream, first) in beginnings
            if not waits and end - first >= _SHARED_TOKENS:
                beginnings.add((stream, first))
        progress.job.memo = Found(cached_tokens, waits)


STOCK: dict[str, type[StockPolicy]] = {
    "fcfs": FcfsPolicy,
    "hrrn": HrrnPolicy,
    "lpm": LpmPolicy,
    "shortest-prefill-first": ShortestPrefillPolicy,
}
