"""What a policy is."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from sage_sched.fairness import Tenants
from sage_sched.gap import Gap
from sage_sched.index import REFRESH_INTERVAL_TOKENS, Indices
from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView


@dataclasses.dataclass(frozen=True, slots=True)
class NoParameters:
    """Of a policy that has nothing to set."""


class Policy(ABC):
    """An order among jobs. Deterministic: every tensor-parallel rank runs its own copy, and all
    must decide alike, so no clock, no randomness, nothing but jobs, views and parameters.

    Parameters: its settings, a frozen dataclass whose fields all have defaults; the section
        `[policy.NAME]` of the configuration file.
    variants: other names for one of ours, and the parameters that each fixes. Such a name has no
        section of its own.
    moves: whether the key of a job changes while the job waits.
    uses_clock: whether it reads SchedulerView.now_s or Job.arrival_s, which rank 0 then broadcasts.
    refines_by: what it makes of the scores of a probe that reads hidden states, or "" if it takes
        none. A server runs a policy that takes some only with a probe.
    refiner: makes of a probe's reading what refines the forecasts; None: sage_sched.probe's.
    refresh_interval_tokens: while the batch is full, who yields is looked at again when a running
        job's age reaches a multiple of it.
    most_yields: a job that has left the device so often yields to nobody any more.
    revision: how often its server's step times were found to be others.
    gap: bounds the time between two tokens of those that run; whoever makes the policy sets it.
    """

    Parameters: ClassVar[type[Any]] = NoParameters
    variants: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    moves: ClassVar[bool] = False
    uses_clock: ClassVar[bool] = False
    refines_by: str = ""
    refiner: Callable[[Any], Any] | None = None
    refresh_interval_tokens: int = REFRESH_INTERVAL_TOKENS
    most_yields: int = 4
    revision: int = 0

    def __init__(
        self, parameters: Any, server: ServerFacts, indices: Indices | None = None
    ) -> None:
        """server: sizes and step times as known at the start, see on_server. indices: if the policy
        goes by such; they are kept up to date here."""
        self.parameters = parameters
        self.server = server
        self.tenants = Tenants()
        self.gap = Gap()
        self._kept = indices

    def on_arrival(self, job: Job) -> bool:
        """A job has come; whether the policy can rank it. One that it cannot rank keeps its turn,
        first come, first served."""
        return True

    def on_forecast(self, job: Job) -> None:
        """What a ranked job rests on has changed while it waits or runs: it was revised, more or
        less of its prompt is cached, or the server is known better."""
        if self._kept is None:
            self.on_arrival(job)
        else:
            self._kept.on_forecast(job)

    def on_forecasts(self, jobs: Sequence[Job]) -> None:
        """What was seen of these ranked jobs' answers has revised how long they are (Job.refined).
        All at once, as scores come after every step."""
        if self._kept is not None:
            self._kept.on_forecasts(jobs)
            return
        for job in jobs:
            self.on_forecast(job)

    def on_server(self, server: ServerFacts) -> None:
        """The server's step times are known better now. on_forecast follows for each ranked job,
        before it is compared with others again, so that all are ranked by the same times."""
        self.server = server
        self.revision += 1
        if self._kept is not None:
            self._kept.on_server(server)

    def on_pass(self, view: SchedulerView) -> None:
        """A pass is about to order the jobs. What may be promised (Job.promise), is now."""
        return

    @abstractmethod
    def key(self, job: Job, view: SchedulerView) -> float:
        """The place of a ranked job: smaller goes first, ties by arrival.

        A key of infinity holds a waiting job back, as long as any other job runs or may enter.
        """

    @property
    def preempts(self) -> bool:
        """Whether should_preempt can ever hold."""
        return type(self).should_preempt is not Policy.should_preempt

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """Whether a running job is to make room for a waiting one of a smaller key, both ranked.

        price_s: seconds of the server that the running one's way out and back takes. What does not
        hold at 0 must not hold at more. view: its waiting jobs are in their order here.
        """
        return False

    def budget(self, view: SchedulerView) -> Budget | None:
        """How much this pass may prefill; None leaves it to SGLang."""
        return None
