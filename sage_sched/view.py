"""Holds the facts of one scheduling pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

from sage_sched.job import Job
from sage_sched.plan import Preempt
from sage_sched.steps import ServerFacts


@dataclass(frozen=True, slots=True)
class Holding:
    """The KV that a running job holds.

    kv_tokens: tokens to move out and back, or to recompute.
    cached_tokens: of these, tokens that a prefill would find in the radix tree.
    freed_tokens: KV that becomes free if the job leaves, because no other job holds or locks it.
    stays_whole: whether its KV must not be recomputed.
    """

    kv_tokens: int
    cached_tokens: int
    freed_tokens: int
    stays_whole: bool


class Kv(Protocol):
    """Answers questions about the KV of the jobs of one pass. Answers are slow, so ask only about
    the jobs that matter."""

    def cached(self, job: Job) -> tuple[int, int]:
        """Return how many tokens of a waiting job the radix tree has, and how many of these are
        only in host memory (SGLang's hierarchical cache)."""

    def shared_tokens(self, job: Job) -> int:
        """Return how many tokens of a waiting job other jobs on the device already hold, so that it
        will share their KV."""

    def common_tokens(self, job: Job, other: Job) -> int:
        """Return how many first tokens a waiting job shares with another job, which waits, is being
        chunked, or runs and has no token yet. 0 if that many are cached."""

    def holding(self, job: Job) -> Holding | None:
        """Return the KV that a running job holds; None if it has to stay."""

    def kept_for(self) -> Mapping[str, int]:
        """Return the evictable KV of the pool by the session that had it last."""

    def fits_adapters(self, names: Collection[str]) -> bool:
        """Return whether requests for all of these LoRA adapters (Job.adapter) may run together."""


@dataclass(frozen=True)
class SchedulerView:
    """The state at one pass, the same on every tensor-parallel rank.

    Do not store a view beyond the pass: it holds requests alive, and their KV in host memory.

    now_s: rank 0's clock, as broadcast, in seconds from an arbitrary moment.
    served_tokens: tokens prefilled and decoded by the server so far.
    num_arrivals: how many requests have come.
    waiting: jobs in the queue. swapped: the waiting jobs with KV in host memory.
    running: jobs that decode. chunked: the job in the middle of its prefill.
    batch_is_full: SGLang's mark: no request is admitted until one leaves.
    free_slots: how many more jobs may run.
    room_tokens, locked_tokens: the parts of the KV pool: free or evictable, and in use.
    host_free_tokens: KV for which host memory has room.
    page_size: tokens of a page of KV.
    step_tokens: KV that the next decode step takes, in whole pages. It may be too large if there is
        room for it.
    pass_tokens: the most that a pass prefills, of all prompts together.
    can_swap: whether KV can be moved to host memory and back. may_preempt: whether running jobs may
        be preempted; if not, swapped jobs come back.
    kv: answers costly questions.
    """

    now_s: float
    served_tokens: int
    num_arrivals: int
    waiting: Sequence[Job]
    swapped: Collection[Job]
    running: Sequence[Job]
    chunked: Job | None
    batch_is_full: bool
    free_slots: int
    room_tokens: int
    locked_tokens: int
    host_free_tokens: int
    page_size: int
    step_tokens: int
    pass_tokens: int
    server: ServerFacts
    can_swap: bool
    may_preempt: bool
    kv: Kv

    def without(self, moved: Sequence[tuple[Preempt, Holding]]) -> Self:
        """Return the view as it will be when these running jobs have been swapped out."""
        gone = {action.job for action, _ in moved}
        freed_tokens = sum(holding.freed_tokens for _, holding in moved)
        return replace(
            self,
            running=[job for job in self.running if job not in gone],
            batch_is_full=False,
            free_slots=self.free_slots + len(gone),
            room_tokens=self.room_tokens + freed_tokens,
            locked_tokens=self.locked_tokens - freed_tokens,
            host_free_tokens=self.host_free_tokens - sum(holding.kv_tokens for _, holding in moved),
        )

    @property
    def chunked_jobs(self) -> list[Job]:
        """Return the chunked job in a list, or an empty list."""
        return [] if self.chunked is None else [self.chunked]

    def uncached_tokens(self, job: Job) -> int:
        """Return the tokens that a prefill computes for a waiting job, in whole pages."""
        num_tokens = job.input_tokens + job.generated_tokens - job.cached_tokens
        return -(-num_tokens // self.page_size) * self.page_size

    @cached_property
    def running_kv_tokens(self) -> int:
        """Return the KV of the running jobs; shared tokens count for each job."""
        return sum([job.input_tokens + job.generated_tokens for job in self.running])
