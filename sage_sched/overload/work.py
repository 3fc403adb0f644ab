"""Sums the work of unfinished requests and of the latest arrivals, by their places in the order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.starts import MOST_TOGETHER
from sage_sched.steps import ServerFacts

# The columns of a job's row: level and key, as in sage_sched.waiting_queue; the seconds that its
# prompt adds to a prefill; the number of prefills to come, 1 or 0; the decode steps while it keeps
# its place, and those to its end; its tokens so far.
NUM_COLUMNS = 7
_LEVEL, _KEY, _PROMPT, _PREFILLS, _QUANTUM, _MEAN, _TOKENS = range(NUM_COLUMNS)
# A row is made again after this many more tokens of the answer, or if more of the prompt is cached
# or prefilled. Both are looked at again after this many seconds.
_INTERVAL_TOKENS, _KEPT_S = 128, 0.25
# Bounds the logarithm of an index, which may be infinite.
_MOST_RISE = 100.0
# The number of remembered arrivals.
_MOST_ARRIVALS = 512


def row_of(job: Job, policy: Policy, server: ServerFacts) -> Floats:
    """Return the row of a job, shape (NUM_COLUMNS,). If the policy preempts no requests, running
    jobs go first."""
    level, key = float(job.level), policy.lasting_key(job) if job.is_ranked else -math.inf
    if job.generated_tokens and not policy.preempts:
        level = key = -math.inf
    prompt_s, prefills = 0.0, 0.0
    if not job.generated_tokens:
        done_tokens = _done_tokens(job)
        prompt_s = server.step_time.prompt_s(done_tokens, job.input_tokens - done_tokens)
        prefills = 1.0
    tokens = job.input_tokens + job.generated_tokens
    return np.array([level, key, prompt_s, prefills, *policy.quantum_steps(job), tokens])


def _done_tokens(job: Job) -> int:
    """Return how many tokens of a job's prompt are cached or prefilled already."""
    return min(max(job.cached_input_tokens, job.prefilled_tokens), job.input_tokens)


@dataclass(frozen=True, slots=True)
class Work:
    """Sums the work of jobs: the seconds of their prompts, and the numbers of prefills, of decode
    steps, of KV tokens times decode steps, of jobs, and of KV tokens halfway through."""

    prompts_s: float = 0.0
    prefills: float = 0.0
    steps: float = 0.0
    kv_steps: float = 0.0
    jobs: float = 0.0
    kv: float = 0.0

    @classmethod
    def ahead_of(cls, place: Floats, rows: Floats, *, ties: bool) -> Work:
        """Return the work that jobs take before a newcomer.

        A job leaves its place as its answer grows. Until its index has risen to the newcomer's, it
        takes the work of its place, multiplied at most by the ratio of the two indices, and no more
        than the work to its end.

        place: a row. rows: shape (jobs, NUM_COLUMNS). ties: whether jobs of the same place go
        before.
        """
        level, key = place[_LEVEL], place[_KEY]
        keys = rows[:, _KEY]
        before = (rows[:, _LEVEL] < level) | (
            (rows[:, _LEVEL] == level) & ((keys <= key) if ties else (keys < key))
        )
        rows = rows[before]
        rises = np.exp(np.minimum(key - np.maximum(rows[:, _KEY], -_MOST_RISE), _MOST_RISE))
        return cls.of(rows, np.minimum(rows[:, _MEAN], rows[:, _QUANTUM] * rises))

    @classmethod
    def of(cls, rows: Floats, steps: Floats) -> Work:
        """Return the work of jobs that take these decode steps, shape (jobs,)."""
        kv = rows[:, _TOKENS] + steps / 2
        sums = rows[:, _PROMPT], rows[:, _PREFILLS], steps, steps * kv, np.ones(len(rows)), kv
        return cls(*(float(column.sum()) for column in sums))

    @classmethod
    def of_quantum(cls, rows: Floats) -> Work:
        """Return the work that jobs take at their places."""
        return cls.of(rows, rows[:, _QUANTUM])

    @classmethod
    def started_with(cls, place: Floats, rows: Floats) -> Work:
        """Return the work of jobs that may start with a newcomer: none of a worse level."""
        return cls.of_quantum(rows[rows[:, _LEVEL] <= place[_LEVEL]])

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self._all(), other._all(), strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * each for each in self._all()))

    def _all(self) -> tuple[float, ...]:
        return self.prompts_s, self.prefills, self.steps, self.kv_steps, self.jobs, self.kv


@dataclass(frozen=True, slots=True)
class Pace:
    """Tells how fast a server works in full batches.

    step_s: the time of a decode step. start_s: the time that the start of a job takes besides its
    prompt: its share of a prefill, and the swap of a job that makes room.
    """

    server: ServerFacts
    step_s: float
    start_s: float

    @classmethod
    def of(cls, work: Work, server: ServerFacts, together: float, rate: float | None) -> Pace:
        """Return the pace of a server whose batches consist of such jobs. work: of at least one
        job. together: how many jobs have shared a prefill of late. rate: the rate of jobs that
        start ahead of the order, each in place of another job; None if jobs start in turn.

        In a full batch such jobs are held until many share a prefill (sage_sched.starts). In a
        batch with room they are not, so each start costs more.
        """
        kv_tokens, step_time = work.kv / work.jobs, server.step_time
        batch = max(1.0, min(server.max_running_requests, server.kv_pool_tokens / kv_tokens))
        step_s = step_time.decode_s(int(batch), int(batch * kv_tokens))
        move_s = 0.0
        if rate is not None:
            held = math.sqrt(2 * rate * batch * step_time.prefill_base_s)
            together = max(together, min(MOST_TOGETHER, held))
            move_s = server.swap_s(int(kv_tokens))
        return cls(server, step_s, step_time.prefill_base_s / together + move_s)

    def busy_s(self, work: Work) -> float:
        """Return how long this work takes."""
        by_slots = work.steps / self.server.max_running_requests
        by_pool = work.kv_steps / self.server.kv_pool_tokens
        return self.starts_s(work) + max(by_slots, by_pool) * self.step_s

    def starts_s(self, work: Work) -> float:
        """Return how long these jobs take to start."""
        return work.prompts_s + work.prefills * self.start_s

    def first_s(self, work: Work) -> float:
        """Return how long new jobs take to their first tokens, with a decode step after each
        prefill."""
        most_together = min(MOST_TOGETHER, self.server.max_running_requests)
        num_prefills = max(1.0, work.prefills / most_together)
        return work.prompts_s + num_prefills * (self.server.step_time.prefill_base_s + self.step_s)

    def alone_s(self, work: Work) -> float:
        """Return how long one new job takes in a full batch."""
        return self.first_s(work) + work.steps * self.step_s

    def num_batches(self, work: Work) -> float:
        """Return how many batches the jobs fill."""
        by_slots = work.jobs / self.server.max_running_requests
        return max(by_slots, work.kv / self.server.kv_pool_tokens)


class Unfinished:
    """Keeps a row for each unfinished job."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._place_of: dict[Job, int] = {}
        # By place: a row, and the interval of the answer and the done part of the prompt with which
        # it was made; None if the row has to be made.
        self._rows: Floats = np.zeros((_MOST_ARRIVALS, NUM_COLUMNS))
        self._made_with: list[tuple[int, int] | None] = []
        self._looked_s = -math.inf

    def add(self, job: Job) -> None:
        if len(self._jobs) == len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
        self._place_of[job] = len(self._jobs)
        self._jobs.append(job)
        self._made_with.append(None)

    def remove(self, job: Job) -> None:
        if job not in self._place_of:
            return
        self._to_end(job)
        del self._place_of[self._jobs.pop()]
        self._made_with.pop()

    def rows(
        self, now_s: float, policy: Policy, server: ServerFacts, *, but: Job | None = None
    ) -> Floats:
        """Return the rows of all jobs but one, shape (jobs, NUM_COLUMNS)."""
        number = len(self._jobs)
        if but is not None:
            if but not in self._place_of:
                self.add(but)
            self._to_end(but)
            number = len(self._jobs) - 1
        looks = not 0 <= now_s - self._looked_s < _KEPT_S
        if looks:
            self._looked_s = now_s
        for place, known in enumerate(self._made_with[:number]):
            if known is None or looks:
                job = self._jobs[place]
                interval = -(-job.generated_tokens // _INTERVAL_TOKENS)
                made_with = interval, 0 if interval else _done_tokens(job)
                if known != made_with:
                    self._rows[place] = row_of(job, policy, server)
                    self._made_with[place] = made_with
        return self._rows[:number]

    def _to_end(self, job: Job) -> None:
        """Swap a job with the last."""
        place, last = self._place_of[job], len(self._jobs) - 1
        self._place_of[self._jobs[last]], self._place_of[job] = place, last
        jobs, made_with = self._jobs, self._made_with
        jobs[place], jobs[last] = jobs[last], jobs[place]
        made_with[place], made_with[last] = made_with[last], made_with[place]
        self._rows[[place, last]] = self._rows[[last, place]]


class Arrivals:
    """Remembers the latest arrivals, from which the next arrivals are predicted."""

    def __init__(self) -> None:
        self._came_s: Floats = np.zeros(_MOST_ARRIVALS)
        self._rows: Floats = np.zeros((_MOST_ARRIVALS, NUM_COLUMNS))
        self._admitted = np.zeros(_MOST_ARRIVALS, bool)
        self._number = 0

    def add(self, now_s: float, row: Floats, *, admitted: bool) -> None:
        at = self._number % _MOST_ARRIVALS
        self._came_s[at], self._admitted[at] = now_s, admitted
        self._rows[at] = row
        self._number += 1

    def clear(self) -> None:
        """Forget all arrivals, because the server is idle. Otherwise idle time would count as a low
        rate."""
        self._number = 0
        self._admitted[:] = False

    def span_s(self, now_s: float) -> float:
        """Return the seconds since the first remembered arrival."""
        return max(0.0, now_s - float(self._came_s[: self._number].min(initial=now_s)))

    def offered(self) -> Work:
        """Return the work of all arrivals to the ends of their answers, refused or not."""
        rows = self._rows[: self._number]
        return Work.of(rows, rows[:, _MEAN])

    def admitted(self) -> Work:
        """Return the work of the admitted arrivals to the ends of their answers."""
        rows = self._rows[self._admitted]
        return Work.of(rows, rows[:, _MEAN])

    def ahead_of(self, place: Floats) -> Work:
        """Return the work that admitted arrivals bring before a newcomer."""
        return Work.ahead_of(place, self._rows[self._admitted], ties=False)
