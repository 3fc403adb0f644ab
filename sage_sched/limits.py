"""Holds the limits of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sage_sched.adapters import Adapters
from sage_sched.batches import Batches
from sage_sched.fair_shares import FairShares
from sage_sched.job import Job
from sage_sched.limit import Limit
from sage_sched.overload import Overload, OverloadConfig
from sage_sched.session_returns import SessionReturns

_Limit = TypeVar("_Limit", bound=Limit)
_EVENTS = ("arrived", "queued", "ended", "prefilled", "decoded", "look", "within")


@dataclass(slots=True, eq=False)
class Limits:
    """The limits that a policy's order must keep. sage_sched.app makes them together with the
    policy.

    bounds: limits of which only the methods of Limit are called.
    fair_shares: lets tenants take turns; None: they do not.
    adapters: shares the slots of LoRA adapters.
    overload: refuses new requests whose answers would come too late.
    batches: finishes batches in time.
    sessions: predicts when sessions come back, to keep their KV; None if no KV is kept for them.
    all: all of these. engaged: fair_shares, adapters and sessions; None unless engaged.
    hearing: by the name of an event, the engaged limits that do not ignore it.
    """

    bounds: Sequence[Limit] = ()
    fair_shares: FairShares | None = None
    adapters: Adapters = field(default_factory=Adapters)
    overload: Overload = field(default_factory=lambda: Overload(OverloadConfig()))
    sessions: SessionReturns | None = None
    batches: Batches = field(default_factory=Batches)
    all: Sequence[Limit] = field(init=False)
    engaged: tuple[FairShares | None, Adapters | None, SessionReturns | None] = field(init=False)
    hearing: dict[str, list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        mine = self.fair_shares, self.adapters, self.overload, self.batches, self.sessions
        found = (*self.bounds, *mine)
        self.all = [limit for limit in found if limit is not None]
        self._hear()

    def _hear(self) -> None:
        self.engaged = _if(self.fair_shares), _if(self.adapters), _if(self.sessions)
        engaged = [limit for limit in self.all if limit.is_engaged]
        self.hearing = {
            event: [
                one for one in engaged if getattr(type(one), event) is not getattr(Limit, event)
            ]
            for event in _EVENTS
        }

    def bounds_after(self, present: Limits) -> list[Limit]:
        """Return the bounds, where possible with all that the present ones have learned."""
        return [next(filter(one.is_like, present.bounds), one) for one in self.bounds]

    def arrived(self, job: Job, before: Limits | None = None) -> None:
        """Note that a job has arrived, or that these limits apply to it because the settings have
        changed.

        before: the limits until then. Parts that both share know the job already.
        """
        new = [limit for limit in self.all if not limit.is_engaged and limit.concerns(job)]
        if new:
            for limit in new:
                limit.is_engaged = True
            self._hear()
        for limit in self.hearing["arrived"]:
            if before is None or limit not in before.all:
                limit.arrived(job)


def _if(limit: _Limit | None) -> _Limit | None:
    return limit if limit is not None and limit.is_engaged else None
