"""SageSched: the smallest Gittins index of the predicted cost first, with a bound on waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sage_sched.fairness import Promises
from sage_sched.fields import MOST, require_within
from sage_sched.index import Indices
from sage_sched.job import Job
from sage_sched.outlook import Outlook
from sage_sched.policy import Policy
from sage_sched.returns import Returns
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView

# While the server works through this many KV pools of tokens (prefill and decode), a waiting
# request's index improves e-fold. Without aging, the mean under overload is up to 8 % shorter and
# p99 half as long again.
AGING_POOLS = 2.0


@dataclass(frozen=True, slots=True)
class SageParameters:
    """Settings of sage (docs/settings.md). regret: see sage_sched.fairness.promises; a smaller one
    shortens tails and lengthens the mean. posterior: see sage_sched.probe.posterior."""

    regret: float = 8.0
    preempts: bool = True
    posterior: bool = False

    def __post_init__(self) -> None:
        require_within("policy.sage.regret", self.regret, 0, MOST, or_inf=True)


class Sage(Policy):
    """Gittins order (SageSched, section 3.3), with aging.

    With G the index, a and now the tokens that the server had served when the job came and has
    served by now, and w the aging window, the job's index counts as `G * exp(-(now - a) / w)`. In
    logarithms `now` is the same for all, so the key is `ln G + a / w`, which stays as it is while a
    job waits. How far a job is overtaken depends on the indices of others; that there is an end to
    it is promised separately (sage_sched.fairness.promises).

    At arrival an index rests on all samples, later on the few that are longer than the age.

    A running request yields if that makes all together wait less, by more than the server stands
    still for it (sage_sched.outlook).

    sage-order is the order alone, without yields. sage+ follows a probe: the index of a running
    request is that of what is left of it by what the model has shown so far.
    """

    Parameters = SageParameters
    variants: ClassVar = {"sage+": {"posterior": True}, "sage-order": {"preempts": False}}
    indices_type: ClassVar[type[Indices]] = Indices

    def __init__(self, parameters: SageParameters, server: ServerFacts) -> None:
        self._indices = self.indices_type(server)
        super().__init__(parameters, server, self._indices)
        self.refines_by = "posterior" if parameters.posterior else ""
        self._aging_tokens = AGING_POOLS * server.kv_pool_tokens
        self._promises = Promises(parameters.regret)
        self.returns = self._returns = Returns()
        self._outlook = Outlook(self._indices, self.key)

    def on_arrival(self, job: Job) -> bool:
        self._promises.arrived(job)
        if job.hints.session:
            self.uses_clock = True
            self._returns.came(job.hints.session, job.arrival_s)
        return self._indices.rank(job)

    def on_end(self, job: Job, now_s: float) -> None:
        self._promises.ended(job)
        if job.hints.session:
            self._returns.left(job.hints.session, now_s, job.hints.next_in_s)

    def on_wait(self, job: Job) -> None:
        self._promises.served(job)

    def on_pass(self, view: SchedulerView) -> None:
        self._promises.look(view)

    def key(self, job: Job, view: SchedulerView) -> float:
        came_at = job.served_at_arrival_tokens / self._aging_tokens
        return self._indices.of(job).log_index + came_at

    @property
    def preempts(self) -> bool:
        return bool(self.parameters.preempts)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return self._outlook.worth_s(running, view) > price_s
