"""Computes the Gittins index of a request from the distribution of its length and the tokens it has
generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from sage_sched.distribution import Floats, LengthDistribution
from sage_sched.job import Job
from sage_sched.steps import Cost, ServerFacts, num_steps, seconds_on

# Tokens after which a running request's index is computed again (SageSched, section 4.1).
REFRESH_INTERVAL_TOKENS = 200


class IndexTable:
    """The Gittins index at every refresh boundary, and past the longest length that was seen. A
    subclass may compute another index.

    Let X be the request's cost. The index at age a is the least expected cost per completion of
    going on from a (SageSched, section 3.3; Gittins 1989):

        inf over D > a of E[min(X, D) - a | X > a] / P(X <= D | X > a)

    The infimum is reached at an atom of X.

    Past the longest length the samples give no information. A request is then expected to go on for
    as long as it has been going (Lindy's law: the mean residual life of a Pareto tail of exponent
    2). So its index keeps rising: the request neither keeps a stale good place nor loses every
    comparison for ever. The chance that an answer gets past all samples, 1 / (samples + 1), is in
    the table from the start.

    Entries are computed lazily, because most answers cross few refresh boundaries.

    believes_tail: whether the table's values also hold between the longest sample and the longer
        length that stands for the tail. If not, Lindy's law begins at the longest sample.
    """

    believes_tail: ClassVar[bool] = False

    def __init__(
        self,
        lengths: LengthDistribution,
        cost: Cost,
        *,
        input_tokens: int,
        max_tokens: int,
        interval_tokens: int,
        cached_tokens: int = 0,
    ) -> None:
        """Make a table for a request.

        max_tokens: the cap on the answer. interval_tokens: the distance between two boundaries.
        cached_tokens: see set_cost.
        """
        self._input_tokens = input_tokens
        self._max_tokens = max_tokens
        self._interval_tokens = interval_tokens
        capped = lengths.capped(max_tokens)
        tailed = capped.with_tail(max_tokens)
        self._seen_tokens, self._end_tokens = int(capped.lengths[-1]), int(tailed.lengths[-1])
        self._lengths, self._weights = tailed.lengths, tailed.weights
        self.set_cost(cost, cached_tokens)

    @classmethod
    def beside(cls, other: IndexTable, cost: Cost) -> Self:
        """Make a table of another cost for the same request, which is cheaper."""
        table = cls.__new__(cls)
        vars(table).update(vars(other))
        table.set_cost(cost, 0)
        return table

    def set_cost(self, cost: Cost, cached_tokens: int) -> None:
        """Use another cost, or another number of cached input tokens, from now on."""
        self._cost = cost
        self._cached_tokens = cached_tokens
        self._costs: Floats = cost(self._input_tokens, self._lengths, cached_tokens)

    def index(self, age_tokens: int) -> float:
        """Return the index, in units of cost, at the last boundary that age_tokens has reached."""
        age_tokens -= age_tokens % self._interval_tokens
        if age_tokens >= (self._end_tokens if self.believes_tail else self._seen_tokens):
            end_tokens = max(min(2 * age_tokens, self._max_tokens), age_tokens + 1)
            return self._spent(end_tokens) - self._spent(age_tokens)
        first = int(np.searchsorted(self._lengths, age_tokens, side="right")) if age_tokens else 0
        return self._computed(self._weights[first:], self._costs[first:] - self._spent(age_tokens))

    def _computed(self, weights: Floats, costs: Floats) -> float:
        """Return the index of a remaining cost with this distribution, in increasing order. The
        weights need not sum to 1."""
        return float(gittins_index(weights, costs))

    def _spent(self, output_tokens: int) -> float:
        # Nothing is spent before the start, even if the model charges for the input.
        if not output_tokens:
            return 0.0
        return float(self._cost(self._input_tokens, output_tokens, self._cached_tokens))


class MeanCost(IndexTable):
    """The mean remaining cost, E[cost at the end - cost at age a | longer than a], at the refresh
    boundaries."""

    believes_tail: ClassVar[bool] = True

    def _computed(self, weights: Floats, costs: Floats) -> float:
        return float(weights @ costs / weights.sum())


def gittins_index(weights: Floats, costs: Floats) -> Floats:
    """Return the index, shape (...), of requests whose remaining cost is one of `costs`.

    `costs` do not decrease. They and `weights` have shape (..., atoms). Leading atoms of weight 0
    may have any cost.
    """
    done = weights.cumsum(axis=-1)
    # Summed from the right, the probability of outliving an atom keeps its precision in the tail,
    # where it counts.
    outlives = weights[..., ::-1].cumsum(axis=-1)[..., ::-1]
    spent = (weights * costs).cumsum(axis=-1)
    spent[..., :-1] += outlives[..., 1:] * costs[..., :-1]
    if done[..., 0].all():
        ratio = spent / done
    else:
        ratio = np.where(done > 0, spent / np.maximum(done, 1e-300), np.inf)
    least: Floats = ratio.min(axis=-1)
    return least


@dataclass(slots=True)
class IndexState:
    """The prediction for a job at its age: the index, its logarithm, and the decode steps
    that remain.

    table, steps_table: the index and the remaining steps at all ages.
    interval: the interval of ages for which the other values hold; -1: none.
    """

    table: IndexTable
    steps_table: MeanCost
    interval: int = -1
    index: float = 0.0
    log_index: float = 0.0
    steps: float = 0.0


class Indices:
    """The Gittins index of each job of a policy, kept in Job.index_state.

    cost_on: returns the cost model of a server. table_type: the kind of index.
    """

    cost_on: Callable[[ServerFacts], Cost] = staticmethod(seconds_on)
    table_type: type[IndexTable] = IndexTable
    interval_tokens: int = REFRESH_INTERVAL_TOKENS

    def __init__(self, server: ServerFacts) -> None:
        self._cost = self.cost_on(server)

    def rank(self, job: Job) -> None:
        """Note that a job has arrived, or that the cost model or its cached tokens have changed."""
        if isinstance(state := job.index_state, IndexState):
            state.table.set_cost(self._cost, job.cached_input_tokens)
            _set_index(state, job.generated_tokens)
            return
        table = self.table_type(
            job.distribution,
            self._cost,
            input_tokens=job.input_tokens,
            max_tokens=job.max_new_tokens,
            interval_tokens=self.interval_tokens,
            cached_tokens=job.cached_input_tokens,
        )
        job.index_state = IndexState(table, MeanCost.beside(table, num_steps))
        self.of(job)  # computed here, because a plan may have to rank many

    def on_server(self, server: ServerFacts) -> None:
        self._cost = self.cost_on(server)

    def of(self, job: Job) -> IndexState:
        """Return the index of a job at its present age."""
        state, age_tokens = job.index_state, job.generated_tokens
        # Called for each running job in each plan, so this does without another call.
        if not isinstance(state, IndexState):  # its policy failed as the job arrived
            self.rank(job)
            state = job.index_state
            assert isinstance(state, IndexState)
        interval = age_tokens // self.interval_tokens
        if state.interval != interval:
            state.interval = interval
            state.steps = state.steps_table.index(age_tokens)
            _set_index(state, age_tokens)
        return state

    def lengths(self, jobs: Iterable[Job]) -> list[float]:
        """Return the expected lengths of the jobs' answers, in tokens, by the remaining steps when
        their indices were last computed. Computing them again takes long."""
        of = self.of
        return [
            job.generated_tokens
            + (state if isinstance(state := job.index_state, IndexState) else of(job)).steps
            for job in jobs
        ]

    def quantum_steps(self, job: Job) -> tuple[float, float]:
        """Return the expected decode steps of a job until its index rises, and to its end.
        The steps until it rises cost no more than the index, which is a cost per completion."""
        state, age_tokens = self.of(job), job.generated_tokens
        mean = self._spent(job, age_tokens + state.steps) - self._spent(job, age_tokens)
        return state.steps * min(1.0, state.index / mean), state.steps

    def _spent(self, job: Job, output_tokens: float) -> float:
        if not output_tokens:
            return 0.0
        return float(self._cost(job.input_tokens, output_tokens, job.cached_input_tokens))


def _set_index(state: IndexState, age_tokens: int) -> None:
    state.index = state.table.index(age_tokens)
    state.log_index = math.log(state.index)
