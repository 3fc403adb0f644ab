"""Keeps the work of unfinished requests and of the latest arrivals, by their places in the
order."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.overload.pace import Work
from sage_sched.policy import Policy
from sage_sched.steps import StepTime

# The rows of a table, which has a column for each job, or for several that are alike. Level and key
# are as in sage_sched.waiting_queue.
NUM_ROWS = 13
(
    LEVEL,
    KEY,
    PROMPT,  # the seconds that its prompt adds to a prefill
    _PREFILLS,  # the number of prefills to come, 1 or 0
    _MEAN,  # the decode steps to its end
    _KV_STEPS,  # its KV tokens times these steps
    _QUANTUM,  # the decode steps while it keeps its place
    _TOKENS,  # its tokens so far, except shared ones
    JOBS,  # the number of jobs
    _SHARED,  # the tokens that it shares
    _CACHED,  # the cached tokens of its prompt
    _NEW,  # the other tokens of its prompt
    CAME,  # when it came
) = range(NUM_ROWS)
# The rows of one job's prefills, and of the work to its end that Pace.busy_s needs: the first
# fields of Work.
STARTS, TO_END = slice(PROMPT, _PREFILLS + 1), slice(PROMPT, _KV_STEPS + 1)
NUM_BUSY = 4
# A column is made again after this many more tokens of the answer, if more of the prompt is cached
# or prefilled, or if the level changes. Columns are looked at again after this many seconds, or if
# many requests have come.
_INTERVAL_TOKENS, KEPT_S = 128, 0.25
# Bounds the logarithm of the ratio of two indices, and a key, which may be infinite.
_MOST_RISE, _LEAST_KEY = 100.0, -1e300
# The number of columns for unfinished jobs.
_MOST = 256
# If there are more jobs, columns are made again once this share of them has changed.
FEW = 1 / 32
# The number of jobs that show how new step times change keys.
_NUM_ASKED = 16


def column_of(job: Job, policy: Policy, step_time: StepTime, now_s: float = 0.0) -> Floats:
    """Return the column of a job, shape (NUM_ROWS,). Jobs that their batch needs go first, and so
    do running jobs if the policy preempts none."""
    lasting = policy.lasting(job)
    level, key = float(job.level), lasting.key
    steps = lasting.steps
    has_begun = job.generated_tokens > 0
    if job.is_due or (has_begun and not policy.can_preempt):
        level = key = -math.inf
    cached_tokens = _done_tokens(job)
    new_tokens = unfilled_tokens(job)
    prompt_s = 0.0 if has_begun else step_time.prompt_s(cached_tokens, new_tokens)
    shared_tokens = min(job.shared_tokens, job.input_tokens - 1)
    tokens = max(1, job.input_tokens + job.generated_tokens - shared_tokens)
    return np.array([
        level, key, prompt_s, not has_begun, steps, steps * (tokens + steps / 2),
        lasting.quantum_steps, tokens, 1.0, shared_tokens, cached_tokens, new_tokens, now_s,
    ])  # fmt: skip


def unfilled_tokens(job: Job) -> int:
    """Return how many tokens of a job's prompt have no KV yet."""
    return 0 if job.generated_tokens > 0 else job.input_tokens - _done_tokens(job)


def _done_tokens(job: Job) -> int:
    """Return how many tokens of a job's prompt are cached or prefilled already."""
    return min(max(job.cached_input_tokens, job.prefilled_tokens), job.input_tokens)


def ahead_of(place: Floats, table: Floats) -> tuple[Floats, Floats]:
    """Return the number of jobs that go before a newcomer in each column, and the decode steps that
    each of them takes meanwhile, both of shape (columns,).

    A job leaves its place as its answer grows. Until its index has risen to the newcomer's, it
    takes the work of its place, multiplied at most by the ratio of the two indices, and no more
    than the work to its end.

    place: a column.
    """
    level, key = float(place[LEVEL]), max(float(place[KEY]), _LEAST_KEY)
    levels, keys = table[LEVEL], table[KEY]
    before = keys <= key
    before &= levels == level
    before |= levels < level
    steps = np.subtract(key, keys)
    np.minimum(steps, _MOST_RISE, out=steps)
    np.exp(steps, out=steps)
    steps *= table[_QUANTUM]
    return before * table[JOBS], np.minimum(steps, table[_MEAN], out=steps)


def work_of(column: Floats) -> Work:
    """Return the work of a job while it keeps its place."""
    values = column.tolist()
    steps, shared = values[_QUANTUM], values[_SHARED]
    kv = values[_TOKENS] + steps / 2
    return Work(values[PROMPT], values[_PREFILLS], steps, steps * kv, 1.0, kv, shared)


def total_work(table: Floats) -> Work:
    """Return the work of all jobs while they keep their places."""
    works = works_of(table, table[JOBS], table[_QUANTUM])
    return Work(*np.add.reduce(works, axis=1).tolist())


def works_of(table: Floats, jobs: Floats, steps: Floats) -> Floats:
    """Return each column's work, shape (fields of Work, columns), if it stands for this number of
    jobs, each decoding for this number of steps."""
    works: Floats = np.empty((len(Work._fields), table.shape[1]))
    np.multiply(table[STARTS], jobs, out=works[:2])
    decoded, kv = works[2], works[5]
    np.multiply(steps, jobs, out=decoded)
    np.multiply(steps, 0.5, out=kv)
    kv += table[_TOKENS]
    np.multiply(decoded, kv, out=works[3])
    works[4] = jobs
    kv *= jobs
    np.multiply(table[_SHARED], jobs, out=works[6])
    return works


class Unfinished:
    """Keeps a column for each unfinished job."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._place_of: dict[Job, int] = {}
        self._table: Floats = np.zeros((NUM_ROWS, _MOST))
        # The values that a job's column was made with (_made_with). New jobs have none yet.
        self._made_with: dict[Job, tuple[int, int, int, int]] = {}
        self._new: dict[Job, None] = {}
        self._changed: dict[Job, None] = {}
        self._looked_s = -math.inf
        # If there are too many jobs: the columns of several each, how many jobs have changed since
        # these were made, and the latest order.
        self._merged = self._table
        self._num_changed = 0
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        self._in_place: Work | None = None

    def add(self, job: Job) -> None:
        self._new[job] = None
        job.column_watch = self._changed

    def remove(self, job: Job) -> None:
        self._new.pop(job, None)
        self._changed.pop(job, None)
        if (place := self._place_of.pop(job, None)) is None:
            return
        job.column_watch = None
        self._num_changed += 1
        if self._in_place is not None:
            self._in_place -= work_of(self._table[:, place])
        last = self._jobs.pop()
        del self._made_with[job]
        if last is not job:
            self._jobs[place], self._place_of[last] = last, place
            self._table[:, place] = self._table[:, len(self._jobs)]

    def table(self, now_s: float, policy: Policy, step_time: StepTime, but: Job) -> Floats:
        """Return the columns of all jobs but a new one, shape (NUM_ROWS, columns). If there are too
        many jobs, each column is the mean of several that are next to each other in the order."""
        for job in [*self._new]:
            if job is not but:
                self.put(job, column_of(job, policy, step_time))
        if not 0 <= now_s - self._looked_s < KEPT_S:
            self._looked_s = now_s
            self._look(policy, step_time)
            if len(self._jobs) <= _MOST:
                self._in_place = None
        number = len(self._jobs)
        table = self._table[:, :number]
        if number <= _MOST:
            self._num_changed = number
            return table
        if self._num_changed > FEW * number:
            self._num_changed, self._in_place = 0, None
            self._order = _ordered(table, self._order)
            self._merged = _merged(table, self._order)
        return self._merged

    @property
    def in_place(self) -> Work:
        """The work of all jobs but new ones while they keep their places."""
        if self._in_place is None:
            self._in_place = total_work(self._table[:, : len(self._jobs)])
        return self._in_place

    def put(self, job: Job, column: Floats) -> None:
        """Set the column of a job that is no longer new."""
        place = self._place_of.setdefault(job, len(self._jobs))
        if place == len(self._jobs):
            self._new.pop(job, None)
            self._jobs.append(job)
            if place == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        elif self._in_place is not None:
            self._in_place -= work_of(self._table[:, place])
        self._num_changed += 1
        if self._in_place is not None:
            self._in_place += work_of(column)
        self._table[:, place] = column
        self._made_with[job] = _made_with(job)

    def _look(self, policy: Policy, step_time: StepTime) -> None:
        """Make the columns of jobs again that have changed."""
        changed = [*self._changed]
        self._changed.clear()
        for job in changed:
            if job in self._place_of and self._made_with[job] != _made_with(job):
                self.put(job, column_of(job, policy, step_time))

    def revise(self, policy: Policy, step_time: StepTime) -> float:
        """Make all columns fit other step times, and return by how much keys have risen.

        Step times change the keys of all jobs about alike. So some jobs show the change, and each
        column is made again later, when its job is ranked again.
        """
        number, rises = len(self._jobs), list[float]()
        table = self._table[:, :number]
        for job in self._jobs[:: max(1, number // _NUM_ASKED)]:
            # The key of a job with tokens may have changed since its column was made.
            if not job.generated_tokens:
                job.changes()
                policy.rank(job)
                rises.append(policy.lasting(job).key - float(table[KEY, self._place_of[job]]))
        rise = sorted(rises)[len(rises) // 2] if rises else 0.0
        revise(table, rise, step_time)
        self._num_changed, self._in_place = number, None
        return rise


def revise(table: Floats, rise: float, step_time: StepTime) -> None:
    """Make columns fit other step times. rise: by how much keys have risen."""
    table[KEY] += rise
    prompts_s = step_time.prompt_s(table[_CACHED], table[_NEW])
    table[PROMPT] = np.where(table[_PREFILLS] > 0, prompts_s, 0.0)


def _made_with(job: Job) -> tuple[int, int, int, int]:
    interval = -(-job.generated_tokens // _INTERVAL_TOKENS)
    return interval, 0 if interval else _done_tokens(job), job.ranked_at, job.level


def _ordered(table: Floats, before: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of the jobs of a table in their order. before: the latest order. Most jobs
    are still in it, which makes the sort five times as fast."""
    number = table.shape[1]
    order = np.concatenate((before[before < number], np.arange(before.size, number)))
    found: NDArray[np.int64] = order[np.lexsort((table[KEY, order], table[LEVEL, order]))]
    return found


def _merged(table: Floats, order: NDArray[np.int64]) -> Floats:
    """Return a table of fewer columns for the same jobs, at least _MOST, in this order."""
    number = table.shape[1]
    ends = np.linspace(0, number, _MOST + 1).astype(np.int64)
    jobs = np.diff(ends)
    merged: Floats = np.add.reduceat(table.take(order, axis=1), ends[:-1], axis=1)
    merged /= jobs
    # All of them go before a newcomer if the last does.
    merged[: KEY + 1] = table[: KEY + 1, order[ends[1:] - 1]]
    merged[JOBS] = jobs
    return merged
