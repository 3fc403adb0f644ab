"""SageSched: the smallest Gittins index of the predicted cost first, with aging."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sage_sched.cost import COSTS, cost_named
from sage_sched.fields import require
from sage_sched.gittins import GittinsTable
from sage_sched.job import Job
from sage_sched.mean_cost import MeanCost
from sage_sched.policy import Policy
from sage_sched.step_time import ServerFacts
from sage_sched.view import SchedulerView

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
    preempts: whether running requests yield.
    preempt_margin: how much better, as a share, a waiting request's index must be than that of a
        running one that is to yield to it.
    """

    index: str = "gittins"
    cost: str = "measured"
    refresh_interval_tokens: int = 200
    refresh: float = 0.3
    aging_pools: float = 2.0
    preempts: bool = True
    preempt_margin: float = 0.5

    def __post_init__(self) -> None:
        require(self.index in _TABLES, "policy.sage.index", self.index, ", ".join(_TABLES))
        require(self.cost in COSTS, "policy.sage.cost", self.cost, ", ".join(COSTS))
        interval = self.refresh_interval_tokens
        require(interval >= 1, "policy.sage.refresh_interval_tokens", interval, "at least 1")
        require(0 <= self.refresh <= 1, "policy.sage.refresh", self.refresh, "0 to 1")
        require(self.aging_pools > 0, "policy.sage.aging_pools", self.aging_pools, "above 0")
        margin = self.preempt_margin
        require(margin >= 0, "policy.sage.preempt_margin", margin, "0 or more")


@dataclass(slots=True)
class _Memo:
    """A job's index at all ages, and its key in the interval of ages last asked for.

    revision: the job's, of the distribution that the table rests on.
    """

    table: GittinsTable | MeanCost
    revision: int
    log_at_arrival: float
    interval: int = -1
    key: float = 0.0


class Sage(Policy):
    """Gittins order (SageSched, section 3.3), divided by e to the work served while waiting.

    With G the index, a and now the tokens that the server had served at the job's arrival and
    has served by now, and w the aging window, the job's index counts as `G * exp(-(now - a) / w)`.
    In logarithms `now` is the same for all, so the key is `ln G + a / w`: constant while a job
    waits, and the wait is bounded, since no G is more than exp((now - a) / w) times another
    for ever: a job is overtaken by none that arrives after `w * ln(its G / smallest G)` tokens.

    With age an index that improves counts in full, one that worsens to the share refresh of its
    logarithm. At arrival it rests on all samples, later on the few that are longer than the age:
    right on average over jobs, but not over those that a newcomer would push out, as these are the
    ones whose index is worst, by bad luck too.

    The variants are the ablations of SageSched, Fig. 10 (costs) and Fig. 11 (mean, norefresh: the
    index at arrival, whatever a job has become), and the order of the waiting alone.
    """

    Parameters = SageParameters
    variants: ClassVar = {
        "sage-order": {"preempts": False},
        "sage-mean": {"index": "mean"},
        "sage-norefresh": {"refresh_interval_tokens": 1 << 30},
        "sage-output": {"cost": "output"},
        "sage-overall": {"cost": "overall"},
        "sage-resource-bound": {"cost": "resource-bound"},
        "sage-measured": {"cost": "measured"},
    }

    def __init__(self, parameters: SageParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self.refresh_interval_tokens = parameters.refresh_interval_tokens
        self._cost = cost_named(parameters.cost, server)
        self._in_seconds = parameters.cost == "measured"
        self._aging_tokens = parameters.aging_pools * server.kv_pool_tokens
        self._refresh = parameters.refresh
        self._log_margin = math.log1p(parameters.preempt_margin)

    def on_arrival(self, job: Job) -> bool:
        """Compute its index at all ages, once a distribution."""
        if job.distribution is None:
            return False
        table = _TABLES[self.parameters.index](
            job.distribution,
            self._cost,
            input_tokens=job.input_tokens,
            max_tokens=job.max_new_tokens,
            interval_tokens=self.refresh_interval_tokens,
        )
        job.memo = _Memo(table, job.revision, math.log(table.index(0)))
        return True

    def on_server(self, server: ServerFacts) -> None:
        """All costs are others."""
        super().on_server(server)
        self._cost = cost_named(self.parameters.cost, server)

    def on_forecast(self, job: Job) -> None:
        """Its index anew."""
        memo = job.memo
        assert isinstance(memo, _Memo)
        if memo.revision != job.revision:
            self.on_arrival(job)
            return
        memo.table.set_cost(self._cost)
        memo.log_at_arrival = math.log(memo.table.index(0))
        memo.interval = -1

    def key(self, job: Job, view: SchedulerView) -> float:
        """`ln G + a / w`, see the class."""
        memo = job.memo
        assert isinstance(memo, _Memo)
        interval = job.generated_tokens // self.refresh_interval_tokens
        if memo.interval != interval:
            memo.interval = interval
            change = math.log(memo.table.index(job.generated_tokens)) - memo.log_at_arrival
            log_index = memo.log_at_arrival + change * (self._refresh if change > 0 else 1.0)
            memo.key = log_index + job.served_at_arrival_tokens / self._aging_tokens
        return memo.key

    @property
    def preempts(self) -> bool:
        """As its parameter says."""
        return bool(self.parameters.preempts)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """If the waiting job's index, the price of the move added to it, is better by
        preempt_margin, so that two of nearly equal index never take turns."""
        ahead = self.key(running, view) - self.key(waiting, view) - self._log_margin
        if ahead <= 0:
            return False
        assert isinstance(waiting.memo, _Memo)
        # In shares of an index in seconds. Other costs are in no unit of time: no price.
        index = waiting.memo.table.index(waiting.generated_tokens)
        price = price_s / index if self._in_seconds else 0.0
        return ahead > math.log1p(price)
