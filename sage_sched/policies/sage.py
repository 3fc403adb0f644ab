"""SageSched: the smallest Gittins index of the predicted cost first, with a bound on regret."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

import numpy as np

from sage_sched.cost import COSTS, cost_named
from sage_sched.distribution import LengthDistribution
from sage_sched.fairness.promises import Promises
from sage_sched.fairness.sessions import Sessions
from sage_sched.fields import LEAST_POOLS, MOST, require, require_within
from sage_sched.index.gittins import GittinsTable, gittins_index
from sage_sched.index.mean_cost import MeanCost
from sage_sched.job import Job
from sage_sched.outlook import Those, gains_steps
from sage_sched.policy import Policy
from sage_sched.probe.refined import Refined
from sage_sched.steps.time import ServerFacts
from sage_sched.view import SchedulerView

# So many of those that wait are looked at, in their order.
_NUM_FORESEEN = 128
# See Sage. Counted twice, as a step that is taken in vain delays those to come too.
_PREFILL_STEPS = 2.0


def _steps(input_tokens: int, output_tokens: Any, cached_tokens: int = 0) -> Any:
    """A decode step a token, as a cost."""
    return output_tokens * 1.0


_TABLES: dict[str, type[GittinsTable | MeanCost]] = {"gittins": GittinsTable, "mean": MeanCost}


@dataclass(frozen=True, slots=True)
class SageParameters:
    """How a length distribution becomes a place in the queue.

    index: gittins, or mean: the mean remaining cost (SageSched, Fig. 11).
    cost: the cost model, see sage_sched.cost.
    refresh_interval_tokens: a running request's index is refreshed every so many tokens (SageSched
        section 4.1: 200).
    refresh: how far a running request's index follows its age where that makes it worse, 0 (not at
        all) to 1 (SageSched).
    aging_pools: while the server works through this many KV pools of tokens (prefill and decode),
        a waiting request's index improves e-fold. Smaller: shorter tails, longer mean.
    regret: nobody overtakes a request any more once the work (tokens) that the server has done
        since it came exceeds (1 + regret) times that for those before it, and a batch; see
        sage_sched.fairness.promises. 0: first come, first served; inf: the order alone. Smaller:
        shorter tails, longer mean.
    preempts: whether running requests yield.
    sessions: whether the requests of a session (Hints.session) count as come when that began; see
        sage_sched.fairness.sessions.
    posterior: whether a probe that reads hidden states refines the forecast of a running request
        (sage_sched.probe.posterior).
    """

    index: str = "gittins"
    cost: str = "measured"
    refresh_interval_tokens: int = 200
    refresh: float = 1.0
    aging_pools: float = 2.0
    regret: float = 8.0
    preempts: bool = True
    sessions: bool = True
    posterior: bool = False

    def __post_init__(self) -> None:
        require(self.index in _TABLES, "policy.sage.index", self.index, ", ".join(_TABLES))
        require(self.cost in COSTS, "policy.sage.cost", self.cost, ", ".join(COSTS))
        interval = self.refresh_interval_tokens
        require_within("policy.sage.refresh_interval_tokens", interval, 1, MOST)
        require_within("policy.sage.refresh", self.refresh, 0, 1)
        aging = self.aging_pools
        require_within("policy.sage.aging_pools", aging, LEAST_POOLS, MOST, or_inf=True)
        require_within("policy.sage.regret", self.regret, 0, MOST, or_inf=True)
        allowed = "false (with policy.sage.index mean)"
        require(
            not self.posterior or self.index == "gittins", "policy.sage.posterior", True, allowed
        )


@dataclass(slots=True)
class _Memo:
    """A job's index and how many steps it has to go, at all ages; and both, with its key, in the
    interval of ages last asked for.

    came_at: what the server had served when the job counts as come. refined: whether index and
        steps are by what was seen of its answer, at its revision; else by the tables. more: what a
        subclass computed of it; no one else reads it.
    """

    table: GittinsTable | MeanCost
    steps_table: MeanCost
    log_at_arrival: float
    came_at: int
    refined: bool = False
    interval: int = -1
    key: float = 0.0
    log_index: float = 0.0
    index: float = 0.0
    steps: float = 0.0
    more: object = None


class Sage(Policy):
    """Gittins order (SageSched, section 3.3), divided by e to the work served while waiting.

    With G the index, a and now the tokens that the server had served at the job's arrival and
    has served by now, and w the aging window, the job's index counts as `G * exp(-(now - a) / w)`.
    In logarithms `now` is the same for all, so the key is `ln G + a / w`: constant while a job
    waits. How far it is overtaken depends on the indices of others; that there is an end to it is
    promised beside (sage_sched.fairness.promises).

    With age an index that improves counts in full, one that worsens to the share refresh of its
    logarithm. At arrival it rests on all samples, later on the few that are longer than the age:
    right on average over jobs, but not over those that a newcomer would push out, as these are the
    ones whose index is worst, by bad luck too.

    One that runs yields if all together wait less for it (sage_sched.outlook), by more than the
    server stands still: for its way out and back and, where memory binds, for a prefill step. One
    that ends makes room for several there, who share a step; those for whom others yield have one
    of their own, shared with as many as yield at that pass. Where slots bind all have their own.

    The variants are the ablations of SageSched, Fig. 10 (costs) and Fig. 11 (mean, norefresh: the
    index at arrival, whatever a job has become), the order of the waiting alone, and requests by
    themselves, whatever session they are of. sage+ goes on from the forecast by the prompt: the
    index of a running request is that of what is left of it by what the model has shown so far.
    """

    Parameters = SageParameters
    variants: ClassVar = {
        "sage+": {"posterior": True},
        "sage-order": {"preempts": False},
        "sage-mean": {"index": "mean"},
        "sage-norefresh": {"refresh_interval_tokens": MOST},
        "sage-nosessions": {"sessions": False},
        "sage-output": {"cost": "output"},
        "sage-overall": {"cost": "overall"},
        "sage-resource-bound": {"cost": "resource-bound"},
        "sage-measured": {"cost": "measured"},
    }

    def __init__(self, parameters: SageParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self.refresh_interval_tokens = parameters.refresh_interval_tokens
        self._cost = cost_named(parameters.cost, server)
        self._aging_tokens = parameters.aging_pools * server.kv_pool_tokens
        self._promises = Promises(parameters.regret)
        self._refresh = parameters.refresh
        self.refines_by = "posterior" if parameters.posterior else ""
        self._sessions = Sessions() if parameters.sessions else None
        self._seen: tuple[ref[SchedulerView], dict[Job, float]] | None = None

    def on_arrival(self, job: Job) -> bool:
        """Compute its index at all ages."""
        self._promises.arrived(job)
        if job.distribution is None:
            return False
        came_at = job.served_at_arrival_tokens
        self._rank(
            job, job.distribution, self._sessions.came_at(job) if self._sessions else came_at
        )
        return True

    def on_pass(self, view: SchedulerView) -> None:
        """Promise their turn to those whose bound is passed."""
        self._promises.look(view)
        if self._sessions is not None:
            moved, came_at = self._sessions.moved_up(view.waiting)
            for job in moved:
                memo = _memo(job)
                memo.came_at, job.place = min(memo.came_at, came_at), None
                memo.key = memo.log_index + memo.came_at / self._aging_tokens

    def on_server(self, server: ServerFacts) -> None:
        """All costs are others."""
        super().on_server(server)
        self._cost = cost_named(self.parameters.cost, server)

    def on_forecast(self, job: Job) -> None:
        """Its index anew."""
        memo = _memo(job)
        memo.table.set_cost(self._cost, job.cached_input_tokens)
        memo.log_at_arrival = math.log(memo.table.index(0))
        self.on_forecasts([job])

    def on_forecasts(self, jobs: Sequence[Job]) -> None:
        """The index at its age alone, of all of them at once: scores come after every step."""
        for job in jobs:
            memo = _memo(job)
            memo.refined, memo.interval = False, -1
        seen = [(job, job.refined) for job in jobs if job.refined is not None]
        for num_lengths in dict.fromkeys(refined.lengths.size for _, refined in seen):
            self._refine([(job, r) for job, r in seen if r.lengths.size == num_lengths])

    def _refine(self, seen: Sequence[tuple[Job, Refined]]) -> None:
        """All with as many lengths."""
        age = np.array([refined.age_tokens for _, refined in seen])
        lengths = np.stack([refined.lengths for _, refined in seen])
        weights = np.stack([refined.weights for _, refined in seen])
        inputs = np.array([[job.input_tokens, job.cached_input_tokens] for job, _ in seen])
        input_tokens, cached_tokens = inputs[:, :1], inputs[:, 1:]
        spent = self._cost(input_tokens, age[:, None], cached_tokens) * (age[:, None] > 0)
        costs = self._cost(input_tokens, lengths, cached_tokens) - spent
        indices = gittins_index(weights, costs).tolist()
        steps = ((lengths * weights).sum(axis=1) - age).tolist()
        for (job, _), index, num_steps in zip(seen, indices, steps, strict=True):
            memo = _memo(job)
            memo.refined = True
            self._set(memo, index, num_steps)

    def key(self, job: Job, view: SchedulerView) -> float:
        """`ln G + a / w`, see the class."""
        return self._at_its_age(job).key

    @property
    def preempts(self) -> bool:
        """As its parameter says."""
        return bool(self.parameters.preempts)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """If all together wait less for it, by more than the server stands still."""
        if self._seen is None or self._seen[0]() is not view:
            self._seen = (ref(view), self._worth_s(view))
        return self._seen[1].get(running, 0.0) > price_s

    def _worth_s(self, view: SchedulerView) -> dict[Job, float]:
        """For how long the server may stand still that one of these yields; those alone for whom
        that is more than a move of their KV takes, if nothing of it is cached: who would yield for
        nothing, but does not for that, need not be asked for more."""
        running = [job for job in view.running if job.is_ranked]
        waiting = [job for job in view.waiting[:_NUM_FORESEEN] if job.is_ranked]
        those_running, those_waiting = self._those(running), self._those(waiting)
        step_time, num_jobs = view.server.step_time, len(view.running) + len(view.waiting)
        kv_tokens = sum([job.input_tokens + job.generated_tokens for job in view.running])
        step_s = step_time.decode_s(len(view.running), kv_tokens)
        slots = len(view.running) + max(0, view.free_slots)
        if len(view.running) * view.server.kv_pool_tokens > slots * kv_tokens:
            gains_s = step_s * gains_steps(those_waiting.of_slots(), those_running.of_slots())
        else:
            gains_s = step_s * gains_steps(those_waiting, those_running)
            num_ahead = np.searchsorted(those_waiting.places, those_running.places)
            num_willing = np.count_nonzero(gains_s > 0)
            together = np.maximum(1, np.minimum(num_ahead, num_willing))
            gains_s -= _PREFILL_STEPS * step_time.prefill_base_s * num_jobs / together
        worth_s = (gains_s / num_jobs).tolist()
        return {
            job: worth
            for job, worth in zip(running, worth_s, strict=True)
            if worth > 0 and worth > _move_s(job, view.server)
        }

    def _those(self, jobs: Sequence[Job]) -> Those:
        memos = [self._at_its_age(job) for job in jobs]
        steps = np.array([memo.steps for memo in memos])
        held = np.array([job.input_tokens + job.generated_tokens for job in jobs])
        return Those(
            np.array(
                [
                    -math.inf if job.is_promised else memo.key
                    for job, memo in zip(jobs, memos, strict=True)
                ]
            ),
            steps,
            held + steps / 2,
            np.array([memo.index for memo in memos]),
        )

    def _at_its_age(self, job: Job) -> _Memo:
        memo = _memo(job)
        interval = job.generated_tokens // self.refresh_interval_tokens
        if memo.interval != interval and not memo.refined:
            memo.interval = interval
            age_tokens = job.generated_tokens
            self._set(memo, memo.table.index(age_tokens), memo.steps_table.index(age_tokens))
        return memo

    def _set(self, memo: _Memo, index: float, steps: float) -> None:
        change = math.log(index) - memo.log_at_arrival
        memo.log_index = memo.log_at_arrival + change * (self._refresh if change > 0 else 1.0)
        memo.key = memo.log_index + memo.came_at / self._aging_tokens
        memo.index = math.exp(memo.log_index)
        memo.steps = steps

    def _rank(self, job: Job, distribution: LengthDistribution, came_at: int) -> None:
        kind = _TABLES[self.parameters.index]
        sizes = {
            "input_tokens": job.input_tokens,
            "max_tokens": job.max_new_tokens,
            "interval_tokens": self.refresh_interval_tokens,
        }
        table = kind(distribution, self._cost, **sizes, cached_tokens=job.cached_input_tokens)
        steps_table = MeanCost(distribution, _steps, **sizes)
        log_index = math.log(table.index(0))
        more = job.memo.more if isinstance(job.memo, _Memo) else None
        job.memo = _Memo(table, steps_table, log_index, came_at, more=more)


def _memo(job: Job) -> _Memo:
    assert isinstance(job.memo, _Memo)
    return job.memo


def _move_s(job: Job, server: ServerFacts) -> float:
    kv_tokens = job.input_tokens + job.generated_tokens
    return min(server.swap_s(kv_tokens), server.recompute_s(kv_tokens))
