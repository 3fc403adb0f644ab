"""Defines the base class of policies."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from sage_sched.headroom import Headroom
from sage_sched.index import Indices
from sage_sched.job import Job
from sage_sched.plan import Budget, NextPlan
from sage_sched.session_returns import SessionReturns
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import MovingKeys, WaitingQueue


@dataclasses.dataclass(frozen=True, slots=True)
class NoParameters:
    """The settings of a policy without any."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """The facts that a policy declares about itself. Most policies need none.

    moving: makes a sage_sched.waiting_queue.MovingKeys from the policy, if a waiting job's key may
        change although the job does not. Each plan puts these jobs in order.
    max_preemptions: a job is preempted for other jobs at most this often.
    preempts_for_starts: whether it preempts only for jobs whose start is due (Job.starts_now).
    regret: the starvation bound (sage_sched.starvation_bound); inf: none.
    starts_within_s: the TTFT target, in seconds, for which new jobs start ahead of its order; 0: no
        job does.
    predicts_waits: whether Policy.lasting gives its order. If not, `[overload]` is refused.
    has_deadlines: whether it orders by deadlines, and weighs TPOT targets itself.
    bounds_time_away: whether swapped-out jobs come back in time (sage_sched.gaps).
    headroom: returns the KV that admission keeps free. Its second argument is Limits.sessions.
    retention: makes the predictor of when sessions come back (sage_sched.limits); None if no KV is
        kept for them.
    refiner: makes a sage_sched.probe.Refiner from the edges of a probe's bins; then servers need a
        probe. None: the policy uses no scores.
    """

    moving: Callable[[Any], MovingKeys] | None = None
    max_preemptions: int = 4
    preempts_for_starts: bool = False
    regret: float = math.inf
    starts_within_s: float = 0.0
    predicts_waits: bool = False
    has_deadlines: bool = False
    bounds_time_away: bool = True
    headroom: Callable[[SchedulerView, SessionReturns | None], Headroom] = Headroom.of
    retention: type[SessionReturns] | None = None
    refiner: Callable[[Any], Any] | None = None


class Lasting(NamedTuple):
    """The part of a job's forecast by which waits are predicted (sage_sched.overload).

    key: the key that the job would have if no job started ahead of the order.
    quantum_steps: the expected decode steps for which it keeps this key.
    steps: the expected decode steps to its end.
    """

    key: float
    quantum_steps: float
    steps: float


class Policy(ABC):
    """An order among jobs.

    Every tensor-parallel rank runs its own copy, and all copies must decide alike. So a policy uses
    no clock and no randomness, only jobs, views and its parameters.

    Parameters: its settings in the section `[policy.NAME]`: a frozen dataclass whose fields all
    have defaults.
    traits: the facts that it declares.
    can_preempt: whether should_preempt can ever be true.
    server: the present facts of its server.
    """

    Parameters: ClassVar[type[Any]] = NoParameters
    traits: Traits = Traits()
    can_preempt: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        # Until there were traits these were attributes of the class. Now they would be ignored.
        for trait in dataclasses.fields(Traits):
            if trait.name in vars(cls):
                raise TypeError(f"{cls.__name__}.{trait.name} has no effect, allowed: in traits")
        cls.can_preempt = cls.should_preempt is not Policy.should_preempt

    def __init__(
        self, parameters: Any, server: ServerFacts, indices: Indices | None = None
    ) -> None:
        """Make a policy for a server whose facts may change later (on_server).

        indices: the Gittins indices of the policy, if it uses them. They are kept up to date here.
        """
        self.parameters = parameters
        self.server = server
        self._kept = indices

    def rank(self, job: Job) -> None:
        """Compute the facts behind a job's key: as it arrives, and again if its prediction
        (Job.refined), its cached tokens, or the server's step times have changed.

        If this raises as the job arrives, or as its prediction or cached tokens change, the job
        goes before all others of its level from then on, and its key is not asked for. If it raises
        because of step times, one pass is ordered by arrival, and the old key stands.
        """
        if self._kept is not None:
            self._kept.rank(job)

    def on_end(self, job: Job, now_s: float) -> None:
        """Note that a job has ended, at its last age, or was aborted."""
        return

    def on_server(self, server: ServerFacts) -> None:
        """Note that the server's step times have changed. All jobs are ranked again, some in each
        plan. Until then a job's old key stands."""
        self.server = server
        if self._kept is not None:
            self._kept.on_server(server)

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        """Note that a pass is about to order the jobs; return when a full batch is planned next.

        queue: the waiting jobs, among them the jobs that came and left since the last pass.
        """
        return NextPlan()

    @abstractmethod
    def key(self, job: Job, view: SchedulerView) -> float:
        """Return the place of a job: smaller goes first, ties by arrival.

        A key of infinity holds a waiting job back while another job runs or may be admitted.
        """

    def lasting(self, job: Job) -> Lasting:
        """Return the forecast of a job."""
        if self._kept is None:
            steps = max(1.0, job.mean_tokens() - job.generated_tokens)
            return Lasting(0.0, steps, steps)
        return Lasting(self._kept.of(job).log_index, *self._kept.quantum_steps(job))

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """Whether a running job is preempted for a waiting one of a smaller key.

        price_s: seconds that the server takes to move the running job out and back. A higher price
            must not turn a refusal into a preemption. view: here its waiting jobs are in the order
            of the plan.
        """
        return False

    def enters_full_at_s(self, job: Job) -> float:
        """Return when a new job might enter a full batch, by SchedulerView.now_s: at once if the
        policy preempts, or never. Until then no plan is made for it. If it is a time, the job is
        behind all others until then."""
        return -math.inf if self.can_preempt else math.inf

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        """Return how much this pass may prefill; None leaves it to SGLang."""
        return None


class FcfsFill(Policy):
    """Serves by arrival, without preemption. It gains over SGLang's `fcfs` by filling the pool
    (sage_sched.headroom). `sage` gains over it by its order.

    A pass falls back to it if its policy fails.
    """

    traits = Traits(predicts_waits=True)

    def key(self, job: Job, view: SchedulerView) -> float:
        """Return the same key for all jobs, so that arrival decides."""
        return 0.0
