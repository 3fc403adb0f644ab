"""Defines the plan of a scheduling pass, and when the next one is due."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sage_sched.index import REFRESH_INTERVAL_TOKENS
from sage_sched.job import Job

# A plan may preempt others for this many waiting jobs, the first of the order.
WINDOW = 16
# At most this many jobs start together (sage_sched.policies.sage). A pass admits fewer.
MOST_TOGETHER = 64


class PreemptionMode(Enum):
    """The place where the KV of a preempted job stays."""

    SWAP = "its KV goes to host memory"
    RECOMPUTE = "its KV stays in the radix tree until another request needs the memory"


@dataclass(frozen=True, slots=True)
class Preempt:
    """Preempts a running job: for a waiting one or, if `to` is None, because memory runs out."""

    job: Job
    mode: PreemptionMode
    reason: str
    to: Job | None = None


@dataclass(frozen=True, slots=True)
class Admit:
    """Prefills a waiting job next, if the engine finds memory for it."""

    job: Job
    reason: str


class Resume(Admit):
    """Resumes a waiting job whose KV is in host memory: it decodes on."""


Action = Preempt | Admit


@dataclass(frozen=True, slots=True)
class Budget:
    """The tokens that a pass may prefill; None leaves the number to the engine.

    prefill_tokens: for all requests together. 0: decode only, while any request runs.
    chunk_tokens: for the prompt that is being chunked, above 0.
    """

    prefill_tokens: int | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless the fields are as the class documents them."""
        for name, least in (("prefill_tokens", 0), ("chunk_tokens", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} is {value!r}, allowed: whole numbers from {least}, None")

    def next_chunk_tokens(self, left_tokens: int, pass_tokens: int, unit_tokens: int) -> int:
        """Return the most KV that the next chunk of a prompt takes, in whole units.

        left_tokens: the rest of the prompt.
        pass_tokens: see SchedulerView.
        unit_tokens: the engine cuts prompts at multiples of it, and always takes one unit.
        """
        limits = (left_tokens, pass_tokens, self.prefill_tokens, self.chunk_tokens)
        num_tokens = min(limit for limit in limits if limit is not None)
        return max(1, -(-num_tokens // unit_tokens)) * unit_tokens


UNLIMITED = Budget()


class Lacking(NamedTuple):
    """The waiting job at which admissions stop, because memory is short.

    needed_tokens: how many free and evictable tokens it needs.
    num_ends: for how many more ends of jobs that is known.
    """

    job: Job
    needed_tokens: int
    num_ends: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass, to be carried out in the order of its fields (sage_sched.scheduling_pass).

    order: positions of SchedulerView.waiting, in the order in which to serve them. Other waiting
        jobs stay behind them as they are.
    actions: the jobs to preempt, admit and resume. The pass stops at the first action that fails.
    num_open: how many more of the order the engine may admit, if it finds memory.
    swapped_go_first: whether no job behind a swapped one is admitted before it.
    decode_only: whether nothing is prefilled, not even the next chunk.
    has_turn: whether running jobs leave because another adapter has its turn.
    is_new: whether candidates were looked at; if not, the last plan still stands.
    num_without_host_room: how many jobs were not preempted because host memory has no room for
        their KV.
    num_too_long: see sage_sched.candidates.
    places: how many jobs are ahead of each job that is ordered for the first time.
    lacking: the job that the actions stop at because memory is short, if any.
    """

    order: Sequence[int]
    actions: tuple[Action, ...] = ()
    num_open: int = 0
    swapped_go_first: bool = True
    decode_only: bool = False
    budget: Budget = UNLIMITED
    has_turn: bool = False
    is_new: bool = False
    num_without_host_room: int = 0
    num_too_long: int = 0
    places: Mapping[Job, int] = field(default_factory=dict)
    lacking: Lacking | None = None


class NextPlan(NamedTuple):
    """Says when a full batch needs another plan, although no job has come.

    at_s: by SchedulerView.now_s.
    at_tokens: by SchedulerView.served_tokens, if interval_tokens is 0.
    interval_tokens: when the age of a running job reaches a multiple of it; 0: at no age.
    """

    at_s: float = math.inf
    at_tokens: float = math.inf
    interval_tokens: int = REFRESH_INTERVAL_TOKENS
