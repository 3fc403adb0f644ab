"""SageSched: the smallest Gittins index of the predicted cost first, with aging."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sage_sched.config import PolicyConfig
from sage_sched.cost import cost_named
from sage_sched.gittins import GittinsTable
from sage_sched.job import Job
from sage_sched.mean_cost import MeanCost
from sage_sched.policy import Policy, register
from sage_sched.step_time import ServerFacts


@dataclass(slots=True)
class _Memo:
    """A job's index at all ages, and its key in the bucket of ages last asked for."""

    table: GittinsTable | MeanCost
    log_at_arrival: float
    bucket: int = -1
    key: float = 0.0


@register("sage")
class SagePolicy(Policy):
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
    """

    cost_name: ClassVar[str | None] = None  # None: the configuration's

    def __init__(self, config: PolicyConfig, server: ServerFacts) -> None:
        super().__init__(config, server)
        cost_name = self.cost_name or config.cost
        self._cost = cost_named(cost_name, server)
        self._in_seconds = cost_name == "measured"
        self._aging_tokens = config.aging_pools * server.kv_pool_tokens
        self._bucket_tokens = config.bucket_tokens
        self._refresh = config.refresh
        self._log_margin = math.log1p(config.preempt_margin)

    def admit(self, job: Job) -> bool:
        if job.distribution is None:
            return False
        table = self._table(job)
        job.memo = _Memo(table, math.log(table.index(0)))
        return True

    def _table(self, job: Job) -> GittinsTable | MeanCost:
        assert job.distribution is not None
        return GittinsTable(
            job.distribution,
            self._cost,
            input_tokens=job.input_tokens,
            max_tokens=job.max_new_tokens,
            bucket_tokens=self.config.bucket_tokens,
        )

    def key(self, job: Job, served_tokens: int) -> float:
        memo = job.memo
        assert isinstance(memo, _Memo)
        bucket = job.generated_tokens // self._bucket_tokens
        if memo.bucket != bucket:
            memo.bucket = bucket
            change = math.log(memo.table.index(job.generated_tokens)) - memo.log_at_arrival
            log_index = memo.log_at_arrival + change * (self._refresh if change > 0 else 1.0)
            memo.key = log_index + job.served_at_arrival_tokens / self._aging_tokens
        return memo.key

    def yields(self, running: Job, waiting: Job, served_tokens: int, move_s: float) -> bool:
        """Where the waiting job's index, the price of the move added to it, is better by
        preempt_margin, so that two of nearly equal index never take turns."""
        ahead = self.key(running, served_tokens) - self.key(waiting, served_tokens)
        ahead -= self._log_margin
        if ahead <= 0:
            return False
        assert isinstance(waiting.memo, _Memo)
        # In shares of an index in seconds. Other costs are in no unit of time: no price.
        index = waiting.memo.table.index(waiting.generated_tokens)
        price = move_s / index if self._in_seconds else 0.0
        return ahead > math.log1p(price)


@register("sage-mean")
class SageMeanPolicy(SagePolicy):
    """The ablation of SageSched, Fig. 11: the mean remaining cost for an index."""

    def _table(self, job: Job) -> MeanCost:
        assert job.distribution is not None
        return MeanCost(
            job.distribution,
            self._cost,
            input_tokens=job.input_tokens,
            max_tokens=job.max_new_tokens,
            bucket_tokens=self.config.bucket_tokens,
        )


@register("sage-order")
class SageOrderPolicy(SagePolicy):
    """The order of the waiting queue alone: no running request yields."""

    yields = Policy.yields


@register("sage-norefresh")
class SageNoRefreshPolicy(SagePolicy):
    """The ablation of SageSched, Fig. 11: the index at arrival, whatever a job has become."""

    def key(self, job: Job, served_tokens: int) -> float:
        assert isinstance(job.memo, _Memo)
        return job.memo.log_at_arrival + job.served_at_arrival_tokens / self._aging_tokens


@register("sage-output")
class SageOutputPolicy(SagePolicy):
    """The ablation of SageSched, Fig. 10: cost is the number of output tokens."""

    cost_name = "output"


@register("sage-overall")
class SageOverallPolicy(SagePolicy):
    """The ablation of SageSched, Fig. 10: cost is input plus twice output."""

    cost_name = "overall"


@register("sage-resource-bound")
class SageResourceBoundPolicy(SagePolicy):
    """The cost of SageSched, section 3.2, which leaves prefill out."""

    cost_name = "resource-bound"


@register("sage-measured")
class SageMeasuredPolicy(SagePolicy):
    """Cost in seconds of this server."""

    cost_name = "measured"
