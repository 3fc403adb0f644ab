"""Answers a pass's questions about the KV of a simulated engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from bench.simulator.decode import DecodeBatch
from bench.simulator.pool import KvPool
from bench.simulator.radix_tree import common_tokens
from bench.simulator.request import Progress
from sage_sched.followed import Positions
from sage_sched.job import Job
from sage_sched.view import Holding


class SimKv:
    """See sage_sched.view.Kv."""

    def __init__(
        self,
        queue: Sequence[Progress],
        waiting: Sequence[Job],
        chunked: Progress | None,
        decode: DecodeBatch,
        pool: KvPool,
        max_adapters: int,
    ) -> None:
        """waiting: the jobs of the queue."""
        self._queue, self._positions = queue, Positions(waiting)
        self._chunked, self._decode = chunked, decode
        self._pool, self._max_adapters = pool, max_adapters

    def _waiting(self, job: Job) -> Progress:
        return self._queue[self._positions[job]]

    def cached(self, job: Job) -> tuple[int, int]:
        progress = self._waiting(job)
        return self._pool.found_tokens(progress), self._pool.host_tokens(progress)

    def shared_tokens(self, job: Job) -> int:
        return self._pool.shared_tokens(self._waiting(job))

    def common_tokens(self, job: Job, other: Job) -> int:
        """No other running job occurs: without overlap scheduling, each has its first token."""
        chunked = self._chunked
        two = chunked if chunked is not None and chunked.job is other else self._waiting(other)
        num_tokens = common_tokens(self._waiting(job).request.spans, two.request.spans)
        return num_tokens if num_tokens > job.cached_tokens else 0

    def holding(self, job: Job) -> Holding | None:
        kv_tokens = job.input_tokens + job.generated_tokens
        cached_tokens = min(job.cached_tokens, kv_tokens)
        freed_tokens = self._pool.alone_tokens(self._decode.of(job))
        return Holding(kv_tokens, cached_tokens, freed_tokens, stays_whole=False)

    def kept_for(self) -> Mapping[str, int]:
        return self._pool.tree.kept_for()

    def fits_adapters(self, names: Collection[str]) -> bool:
        return len({*names}) <= self._max_adapters


class DecodeKv(SimKv):
    """The same on a decode engine. All prompts come prefilled, and only decoding jobs may leave."""

    def cached(self, job: Job) -> tuple[int, int]:
        return self._waiting(job).request.input_tokens, super().cached(job)[1]

    def common_tokens(self, job: Job, other: Job) -> int:
        return 0

    def holding(self, job: Job) -> Holding | None:
        if job not in self._decode.jobs:  # its KV is on the way
            return None
        holding = super().holding(job)
        return None if holding is None else replace(holding, stays_whole=True)
