"""Estimates the work of jobs and the speed of a server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import add, sub
from typing import Any, NamedTuple

import numpy as np

from sage_sched.plan import MOST_TOGETHER
from sage_sched.steps import ServerFacts


class Work(NamedTuple):
    """The work of jobs: the seconds of their prompts, and the numbers of prefills, of decode steps,
    of KV tokens times decode steps, of jobs, and of KV tokens halfway through. Shared tokens take
    memory once, so they count apart. Each is a number, or an array of them."""

    prompts_s: Any = 0.0
    prefills: Any = 0.0
    steps: Any = 0.0
    kv_steps: Any = 0.0
    jobs: Any = 0.0
    kv: Any = 0.0
    shared: Any = 0.0

    def __add__(self, other: Iterable[Any]) -> Work:
        return Work(*map(add, self, other))

    def __sub__(self, other: Iterable[Any]) -> Work:
        return Work(*map(sub, self, other))


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a server in full batches.

    step_s: the time of a decode step. joined_s: the time of one in the batch that a newcomer joins,
    which may have room. start_s: the time to start a job, without its prompt: its share of a
    prefill, and the swap of a job that makes room.
    held_s: the mean time for which a job that starts ahead of the order is held.
    """

    server: ServerFacts
    step_s: float
    joined_s: float
    start_s: float
    held_s: float = 0.0

    @classmethod
    def of(cls, work: Work, server: ServerFacts, together: float, rate: float) -> Pace:
        """Return the pace of a server whose batches consist of such jobs. work: of at least one
        job. together: how many jobs have shared a prefill recently. rate: the rate of jobs that
        start ahead of the order, each instead of another job; 0 if jobs start in turn.

        In a full batch such jobs are held until many share a prefill (sage_sched.policies.sage). In
        a batch with room they are not, so each start costs more.
        """
        kv_tokens, step_time = work.kv / work.jobs, server.step_time
        batch = max(1.0, min(server.max_running_requests, server.kv_pool_tokens / kv_tokens))
        # Each job of a step reads its shared tokens, too.
        read_tokens = kv_tokens + work.shared / work.jobs
        joined = min(batch, work.jobs)
        step_s, joined_s = (
            step_time.decode_s(int(number), int(number * read_tokens)) for number in (batch, joined)
        )
        move_s = held_s = 0.0
        if rate:
            held = math.sqrt(2 * rate * batch * step_time.prefill_base_s)
            together = max(together, min(MOST_TOGETHER, held))
            move_s = server.swap_s(int(kv_tokens))
            held_s = held / rate / 2 if work.jobs > batch else 0.0
        start_s = step_time.prefill_base_s / together + move_s
        return cls(server, step_s, joined_s, start_s, held_s)

    def busy_s(self, work: Work) -> Any:
        """Return how long this work takes."""
        return self.starts_s(work) + self.steps_s(work)

    def steps_s(self, work: Work) -> Any:
        """Return how long the decode steps of this work take."""
        by_slots = work.steps / self.server.max_running_requests
        by_pool = work.kv_steps / self.server.kv_pool_tokens
        most = np.maximum if isinstance(by_slots, np.ndarray) else max
        return most(by_slots, by_pool) * self.step_s

    def starts_s(self, work: Work) -> Any:
        """Return how long these jobs take to start."""
        return work.prompts_s + work.prefills * self.start_s

    def first_s(self, work: Work) -> float:
        """Return how long new jobs take to their first tokens, with a decode step after each
        prefill."""
        most_together = min(MOST_TOGETHER, self.server.max_running_requests)
        num_prefills = max(1.0, work.prefills / most_together)
        prefill_s = self.server.step_time.prefill_base_s
        return float(work.prompts_s + num_prefills * (prefill_s + self.joined_s))

    def served_s(self, work: Work) -> float:
        """Return how long one new job takes in the batch that it joins."""
        return float(self.first_s(work) + work.steps * self.joined_s)

    def alone_s(self, work: Work) -> float:
        """Return how long one new job takes on an idle server."""
        step_time = self.server.step_time
        step_s = step_time.decode_s(1, int(work.kv + work.shared))
        return float(work.prompts_s + step_time.prefill_base_s + work.steps * step_s)

    def num_batches(self, work: Work) -> float:
        """Return how many batches the jobs fill."""
        by_slots = work.jobs / self.server.max_running_requests
        return float(max(by_slots, work.kv / self.server.kv_pool_tokens))
