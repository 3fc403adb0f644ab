"""Defines the base class of policies."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

from sage_sched.headroom import Headroom
from sage_sched.index import REFRESH_INTERVAL_TOKENS, Indices
from sage_sched.interleaving import Group, group_of
from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.session_returns import SessionReturns
from sage_sched.sorted_jobs import Entry
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue, place_of


@dataclasses.dataclass(frozen=True, slots=True)
class NoParameters:
    """The settings of a policy without any."""


class Policy(ABC):
    """An order among jobs.

    Every tensor-parallel rank runs its own copy, and all copies must decide alike. So a policy uses
    no clock and no randomness, only jobs, views and its parameters.

    Parameters: its settings in the section `[policy.NAME]`: a frozen dataclass whose fields all
    have defaults.
    variants: other names for a policy of ours, and the parameters that each fixes.
    moves: whether a waiting job's key may change although the job does not. If so, each plan puts
        all waiting jobs in order.
    has_deadlines: whether it orders by deadlines, and weighs TPOT targets itself.
    bounds_time_away: whether swapped-out jobs come back in time (sage_sched.swap_out_bound).
    starts_early: whether new jobs start ahead of its order, for their first tokens.
    predicts_waits: whether lasting_key is its order. If not, `[overload]` is refused.
    uses_clock: whether it reads SchedulerView.now_s or Job.arrival_s, which rank 0 then broadcasts.
    refiner: makes a sage_sched.probe.Refiner from the edges of a probe's bins; then servers need a
        probe. None: the policy uses no scores.
    refresh_interval_tokens: in a full batch, preemption is considered again when a running job's
        age reaches a multiple of it.
    max_preemptions: a job that was preempted this often is not preempted for other jobs any more.
    plan_by_s: when it wants the next plan, by SchedulerView.now_s, even if nothing has changed.
        Each plan resets it before on_pass.
    plan_by_tokens: the same by SchedulerView.served_tokens, if the ages of running jobs do not
        decide whether a job enters a full batch.
    revision: how often the keys of all jobs have changed, for example because the server's step
        times have. The queue then ranks its jobs again, some in each plan.
    retention: makes the predictor of when sessions come back (sage_sched.limits); None if no KV is
        kept for them.
    queue: the waiting jobs, in order.
    """

    Parameters: ClassVar[type[Any]] = NoParameters
    variants: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    moves: ClassVar[bool] = False
    has_deadlines: ClassVar[bool] = False
    bounds_time_away: ClassVar[bool] = True
    predicts_waits: ClassVar[bool] = False
    retention: ClassVar[type[SessionReturns] | None] = None
    starts_early: bool = False
    uses_clock: bool = False
    refiner: Callable[[Any], Any] | None = None
    refresh_interval_tokens: int = REFRESH_INTERVAL_TOKENS
    max_preemptions: int = 4
    plan_by_s: float = math.inf
    plan_by_tokens: float = math.inf
    revision: int = 0

    def __init__(
        self, parameters: Any, server: ServerFacts, indices: Indices | None = None
    ) -> None:
        """Make a policy for a server whose facts may change later (on_server).

        indices: the Gittins indices of the policy, if it uses them. They are kept up to date here.
        """
        self.parameters = parameters
        self.server = server
        self.queue = WaitingQueue()
        self._kept = indices

    def takes_over(self, before: Policy) -> None:
        """Take over what another policy has counted, if it counts alike. Called after a change of
        settings, before the jobs arrive here."""
        return

    def on_arrival(self, job: Job) -> bool:
        """Note that a job has arrived; return whether the policy can rank it. If not, the job is
        ordered by arrival."""
        return self._kept is None or self._kept.rank(job)

    def on_end(self, job: Job, now_s: float) -> None:
        """Note that a job has ended, at its last age, or was aborted."""
        return

    def on_prediction(self, job: Job) -> None:
        """Note that the facts behind a ranked job's key have changed: its predicted length (also
        Job.refined), its cached tokens, or the server's step times."""
        if self._kept is None:
            self.on_arrival(job)
        else:
            self._kept.on_prediction(job)

    def on_server(self, server: ServerFacts) -> None:
        """Note that the server's step times have changed. on_prediction follows for each ranked
        job, for some in each plan. Until then a job's old key stands."""
        self.server = server
        self.revision += 1
        if self._kept is not None:
            self._kept.on_server(server)

    def on_queued(self, job: Job) -> None:
        """Note that a job begins to wait. Called before on_pass."""
        return

    def on_dequeued(self, job: Job) -> None:
        """Note that a job stops waiting."""
        return

    def is_moving(self, job: Job) -> bool:
        """Whether the key of this ranked job changes while it waits."""
        return self.moves

    def first_moving(self, jobs: Collection[Job], num: int, view: SchedulerView) -> list[Entry]:
        """Return at least the first num of the jobs whose keys move, in order."""
        return sorted((*place_of(job, self, view), job) for job in jobs)

    def moving_groups(
        self, jobs: Collection[Job], view: SchedulerView
    ) -> dict[Group, Iterator[Entry]]:
        """Return the jobs whose keys move and whose classes share fairly, in order, by group. A job
        that is held back is in none."""
        groups: dict[Group, list[Entry]] = {}
        for entry in self.first_moving(jobs, len(jobs), view):
            if entry[0] < math.inf and (group := group_of(entry[3])) is not None:
                groups.setdefault(group, []).append(entry)
        return {group: iter(entries) for group, entries in groups.items()}

    def on_pass(self, view: SchedulerView) -> None:
        """Note that a pass is about to order the jobs. Jobs pass their starvation bound here."""
        return

    @abstractmethod
    def key(self, job: Job, view: SchedulerView) -> float:
        """Return the place of a ranked job: smaller goes first, ties by arrival.

        A key of infinity holds a waiting job back while another job runs or may be admitted.
        """

    def lasting_key(self, job: Job) -> float:
        """Return the key that a ranked job would have if no job started ahead of the order
        (starts_early). Predicted waits use it (sage_sched.overload)."""
        return 0.0 if self._kept is None else self._kept.of(job).log_index

    def quantum_steps(self, job: Job) -> tuple[float, float]:
        """Return the expected decode steps for which a job keeps its lasting_key, and the expected
        steps to its end."""
        if self._kept is None or not job.is_ranked:
            steps = max(1.0, job.mean_tokens() - job.generated_tokens)
            return steps, steps
        return self._kept.quantum_steps(job)

    def starts_now(self, job: Job) -> bool:
        """Whether this waiting job's start is due. It may then be admitted to a full batch without
        preempting another."""
        return False

    @property
    def preempts(self) -> bool:
        """Whether should_preempt can ever be true."""
        return type(self).should_preempt is not Policy.should_preempt

    def preempts_for(self, waiting: Job) -> bool:
        """Whether should_preempt can be true for this waiting job, whatever job runs, or its start
        is due."""
        return self.preempts or self.starts_now(waiting)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """Whether a running job is preempted for a waiting one of a smaller key, both ranked.

        price_s: seconds that the server takes to move the running job out and back. A higher price
            must not turn a refusal into a preemption. view: here its waiting jobs are in the order
            of the plan.
        """
        return False

    def budget(self, view: SchedulerView) -> Budget | None:
        """Return how much this pass may prefill; None leaves it to SGLang."""
        return None

    def headroom(self, view: SchedulerView, sessions: SessionReturns | None) -> Headroom:
        """Return the KV that admission keeps free. sessions: see sage_sched.limits."""
        return Headroom.of(view, sessions)


class FcfsFill(Policy):
    """Serves by arrival, without preemption. It gains over SGLang's `fcfs` by filling the pool
    (sage_sched.headroom). `sage` gains over it by its order.

    A pass falls back to it if its policy fails.
    """

    predicts_waits = True

    def key(self, job: Job, view: SchedulerView) -> float:
        """Return the same key for all jobs, so that arrival decides."""
        return 0.0
