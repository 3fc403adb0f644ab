"""Holds the limits of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sage_sched.adapters import Adapters
from sage_sched.interleaving import Interleaving
from sage_sched.job import Job
from sage_sched.limit import Limit
from sage_sched.overload import Overload, OverloadConfig
from sage_sched.plan import Budget
from sage_sched.session_returns import SessionReturns
from sage_sched.view import SchedulerView


@dataclass(slots=True, eq=False)
class Limits:
    """The limits that a policy's order must keep. sage_sched.app makes them together with the
    policy.

    bounds: limits that are asked nothing but what Limit says.
    interleaving: may let tenants take turns.
    adapters: shares the slots of LoRA adapters.
    overload: refuses new requests whose answers would come too late.
    sessions: predicts when sessions come back, to keep their KV; None if no KV is kept for them.
    all: all of these.
    """

    bounds: Sequence[Limit] = ()
    interleaving: Interleaving = field(default_factory=Interleaving)
    adapters: Adapters = field(default_factory=Adapters)
    overload: Overload = field(default_factory=lambda: Overload(OverloadConfig()))
    sessions: SessionReturns | None = None
    all: Sequence[Limit] = field(init=False)

    def __post_init__(self) -> None:
        sessions = () if self.sessions is None else (self.sessions,)
        self.all = (*self.bounds, self.interleaving, self.adapters, self.overload, *sessions)

    def arrived(self, job: Job, before: Limits | None = None) -> None:
        """Note that a job has arrived, or that these limits apply to it because the settings have
        changed.

        before: the limits until then. What they have in common with these knows the job.
        """
        for limit in self.all:
            if before is None or limit not in before.all:
                limit.arrived(job)

    def within(self, budget: Budget, view: SchedulerView) -> Budget:
        """Return the budget of a pass, cut to what all allow."""
        for limit in self.bounds:
            budget = limit.within(budget, view)
        return budget
