"""Keeps the state of jobs with an SLO, and the gain per second of serving each (ProServe, section
4.2)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from sage_sched.distribution import Floats, LengthDistribution
from sage_sched.job import Entry, Group, Job
from sage_sched.slo.deadlines import Deadlines
from sage_sched.steps import Cost

NEVER = -1
# Densities depend on numbers rounded to powers of two, so that each density holds for a while. A
# pass computes at most this many densities.
_NUM_LOOKED_AT = 16
_MOST_DOUBLINGS = 64
# The gain of an answer is computed again after this many tokens.
_INTERVAL_TOKENS = 64
# The columns of Waiting. The order depends on the first _NUM_ORDERING of them.
DENSITY, LOOKED_AT, _NUM_ORDERING = 3, 4, 5
_TOO_LATE_S, _FIRST_S, _FIRST_WEIGHT, _ARRIVAL, _LEVEL = range(5, 10)
_KEY, _URGENT, _GROUP, _NUM_COLUMNS = range(10, 14)


@dataclass(frozen=True, slots=True)
class Worth:
    """The gain of an answer whose length has a known distribution.

    The paper's density looks at the next token alone. But prefilling a prompt also pays for its
    answer. With S(k) the share of answers of at least k tokens, serving an answer up to its K-th
    token gains and costs, on average,

        V(K) = sum over k <= K of w(k) S(k) [token k is on time]
        C(K) = prefill + sum over k <= K of S(k) * time of its k-th token

    and its density is the best V(K) / C(K), for K among the lengths of the distribution. A late
    answer catches up with its `first`-th token; the tokens before it gain nothing. Seconds are
    those of a cost model, which charges for memory and slots too.

    lengths: ascending. before: the length before each.
    survival: the share of answers that are longer than `before`.
    costs_s: the cost of an answer of each length. steps_s: the cost since the length before.
    All of shape (lengths,).
    """

    lengths: Floats
    before: Floats
    survival: Floats
    costs_s: Floats
    steps_s: Floats

    @classmethod
    def of(
        cls, known: LengthDistribution, cost: Cost, input_tokens: int, cached_tokens: int = 0
    ) -> Self:
        """Make the worth from a distribution with its tail, up to the cap."""
        lengths = known.lengths.astype(np.float64)
        weights = np.asarray(known.weights, np.float64)
        survival = np.cumsum(weights[::-1])[::-1]
        costs_s = np.asarray(cost(input_tokens, lengths, cached_tokens), np.float64)
        before = np.concatenate(([0.0], lengths[:-1]))
        return cls(lengths, before, survival, costs_s, np.diff(costs_s, prepend=0.0))

    def density(
        self, first_weight: float, next_weight: float, age: int, first: int, spent_s: float
    ) -> float:
        """Return the density at this age (0: nothing is prefilled).

        first: the number of the next token that is on time (1: the first token); all later ones are
            on time too. spent_s: the costs that have been spent already.
        """
        at = int(np.searchsorted(self.lengths, age, side="right"))
        if at == len(self.lengths):
            return 0.0
        # Shares of all answers, not only of the answers that reach this age: the factor cancels
        # out.
        survival, lengths = self.survival[at:], self.lengths[at:]
        before, costs_s = self.before[at:].copy(), self.steps_s[at:].copy()
        before[0], costs_s[0] = age, self.costs_s[at] - spent_s
        # The number of tokens on time between one length and the next.
        late = first - 1
        on_time = np.maximum(lengths, late) - np.maximum(before, late)
        gains = next_weight * survival * on_time
        if first <= 1 and age == 0:
            gains[0] += first_weight - next_weight
        spent = np.maximum((costs_s * survival).cumsum(), 1e-12)
        return float((gains.cumsum() / spent).max())


@dataclass(slots=True)
class SloState:
    """The state of a job with an SLO, kept in Job.memo.

    worth: the worth of its answer. exec_s: seconds that its next token takes, by the model of step
        times.
    due_s: that token's deadline, by SchedulerView.now_s.
    looked_at: the values that density depends on, see Waiting.look.
    is_urgent, key: the results of the last pass. column: its place in Waiting; None if it does not
        wait.
    """

    deadlines: Deadlines
    worth: Worth
    exec_s: float
    due_s: float = math.inf
    density: float = 0.0
    looked_at: int = NEVER
    is_urgent: bool = False
    key: float = 0.0
    column: int | None = None


Pair = tuple[Job, SloState]


def slo_state_of(job: Job) -> SloState | None:
    """Return the job's state; None if the job has no SLO, or could not be ranked."""
    return job.memo if isinstance(job.memo, SloState) else None


def slo_states_of(jobs: Iterable[Job]) -> list[Pair]:
    return [(job, job.memo) for job in jobs if isinstance(job.memo, SloState)]


def columns_of(jobs: Iterable[Pair]) -> Floats:
    """Return the columns that the order depends on, shape (columns, jobs)."""
    rows = [(p.exec_s, p.due_s, p.deadlines.tpot_s, p.density, p.looked_at) for _, p in jobs]
    return np.array(rows, np.float64).reshape(len(rows), _NUM_ORDERING).T


class Waiting:
    """Waiting jobs with an SLO, as columns. All of them are ordered again in each pass.

    jobs: one a column, in no order.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._table: Floats = np.zeros((_NUM_COLUMNS, 64))
        # The number of each group, and how many jobs it has. 0: no group.
        self._groups: dict[Group, tuple[int, int]] = {}
        self._next_group = 1

    @property
    def columns(self) -> Floats:
        """Return the columns that the order depends on, in the form of columns_of."""
        return self._table[:_NUM_ORDERING, : len(self.jobs)]

    @property
    def key(self) -> Floats:
        """Return the key of each job in the last pass."""
        return self._table[_KEY, : len(self.jobs)]

    @property
    def urgent(self) -> Floats:
        """Return whether each job was urgent in the last pass."""
        return self._table[_URGENT, : len(self.jobs)]

    def add(self, job: Job, p: SloState) -> None:
        p.column = len(self.jobs)
        self.jobs.append(job)
        if p.column == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        self._table[:, p.column] = 0.0
        if (group := job.group) is not None:
            number, num_jobs = self._groups.get(group, (self._next_group, 0))
            self._groups[group] = number, num_jobs + 1
            self._next_group += not num_jobs
            self._table[_GROUP, p.column] = number
        self.update(job, p)

    def update(self, job: Job, p: SloState) -> None:
        deadlines, begun = p.deadlines, job.generated_tokens > 0
        self._table[:_KEY, p.column] = (
            p.exec_s, p.due_s, deadlines.tpot_s, p.density, p.looked_at,
            math.inf if begun else p.due_s + deadlines.ttft_s, 0.0 if begun else p.exec_s,
            0.0 if begun else deadlines.first_weight, job.arrival, job.level,
        )  # fmt: skip

    def remove(self, p: SloState) -> None:
        """Remove a job. The last job takes its column."""
        column, p.column = p.column, None
        assert column is not None
        if (group := self.jobs[column].group) is not None:
            number, num_jobs = self._groups.pop(group)
            if num_jobs > 1:  # clients may name any number of tenants
                self._groups[group] = number, num_jobs - 1
        last = self.jobs.pop()
        if column < len(self.jobs):
            self.jobs[column] = last
            self._table[:, column] = self._table[:, len(self.jobs)]
            moved = slo_state_of(last)
            assert moved is not None
            moved.column = column

    def first_tokens(self) -> tuple[float, float]:
        """Return the sums of the gains and of the seconds of first tokens."""
        weights, exec_s = self._table[[_FIRST_WEIGHT, _FIRST_S], : len(self.jobs)].sum(axis=1)
        return float(weights), float(exec_s)

    def late(self, now_s: float) -> Iterator[Job]:
        """Yield, by arrival, the jobs that are late by more than their whole TTFT."""
        late = np.flatnonzero(self._table[_TOO_LATE_S, : len(self.jobs)] < now_s)
        by_arrival = late[np.argsort(self._table[_ARRIVAL, late])]
        return (self.jobs[column] for column in by_arrival)

    def first(self, num: int) -> list[Entry]:
        """Return the first num jobs by level, key and arrival."""
        key, at = self.key, np.arange(len(self.jobs))
        arrival, level = self._table[[_ARRIVAL, _LEVEL], : len(self.jobs)]
        best = level == level.min(initial=math.inf)
        if np.count_nonzero(best) >= num:
            at = at[best]
            at = at[key[at] <= np.partition(key[at], num - 1)[num - 1]]
        order = at[np.lexsort((arrival[at], key[at], level[at]))][:num]
        jobs = [self.jobs[column] for column in order.tolist()]
        keys = key[order].tolist()
        return [(job.level, key, job.arrival, job) for job, key in zip(jobs, keys, strict=True)]

    def groups(self, but: Collection[Job | None]) -> dict[Group, Iterator[Entry]]:
        """Return the jobs that share fairly, in order, by group; without some, and without jobs
        that go first. No job's entry is made before it is asked for."""
        number, arrival = self._table[[_GROUP, _ARRIVAL], : len(self.jobs)]
        at = np.flatnonzero(number)
        at = at[np.lexsort((arrival[at], self.key[at], number[at]))]
        starts = np.flatnonzero(np.diff(number[at], prepend=0.0)).tolist()
        columns, keys = at.tolist(), self.key[at].tolist()

        def entries(start: int, end: int) -> Iterator[Entry]:
            for place in range(start, end):
                job = self.jobs[columns[place]]
                if not job.goes_first and job not in but:
                    yield job.level, keys[place], job.arrival, job

        groups: dict[Group, Iterator[Entry]] = {}
        for start, end in pairwise((*starts, len(columns))):
            group = self.jobs[columns[start]].group
            assert group is not None
            groups[group] = entries(start, end)
        return groups

    def look(
        self, begun: list[Pair], num_running: int, late_steps: Floats, before: Floats, cost: Cost
    ) -> None:
        """Update the densities by the gain of the whole answer (Worth; ours).

        A density is computed again if the job's age or the number of tokens until it catches up has
        changed. Both are rounded, the latter to powers of two (0: it is in time).

        begun: the first num_running of them run.
        late_steps: the steps until each job's tokens are in time again, those of begun first.
        before: the values that the densities depend on. cost: the cost of an answer by its length.
        """
        tokens = np.where(late_steps > 0, np.minimum(late_steps, 1e9) + 1, 0.5)
        late = (np.floor(np.log2(tokens)) + 1).astype(np.int64)
        ages = np.zeros(len(late), np.int64)
        ages[:num_running] = [
            job.generated_tokens // _INTERVAL_TOKENS + 1 for job, _ in begun[:num_running]
        ]
        looked_at = late + _MOST_DOUBLINGS * ages
        changed = np.flatnonzero(looked_at != before)
        if changed.size > _NUM_LOOKED_AT:  # in the order of the last pass
            key = np.append(np.full(len(begun), -np.inf), self.key)
            changed = changed[np.argsort(key[changed], kind="stable")]
        others = changed[_NUM_LOOKED_AT:]
        for at in (*changed[:_NUM_LOOKED_AT].tolist(), *others[before[others] == NEVER].tolist()):
            job, p = begun[at] if at < len(begun) else _pair(self.jobs[at - len(begun)])
            p.looked_at = int(looked_at[at])
            p.density = _density(job, p, int(late[at]), cost)
            if p.column is not None:
                self._table[DENSITY : LOOKED_AT + 1, p.column] = p.density, p.looked_at


def _pair(job: Job) -> Pair:
    assert isinstance(job.memo, SloState)
    return job, job.memo


def _density(job: Job, p: SloState, doublings: int, cost: Cost) -> float:
    age = job.generated_tokens
    first = age + 1 + (0 if doublings == 0 else int(1.5 * 2.0 ** (doublings - 1)))
    if first > job.max_new_tokens:
        return 0.0
    spent_s = cost(job.input_tokens, age, job.cached_input_tokens) if age else 0.0
    deadlines = p.deadlines
    return p.worth.density(deadlines.first_weight, deadlines.next_weight, age, first, spent_s)
