"""What happens on a scheduler, and who takes part in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from patches.engine_types import Batch, Req
from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.plan import Action, Plan
from sage_sched.policy import Policy


class Listener:
    """Takes part in the events of one scheduler. A method that is not overridden does nothing.

    All ranks get the same events in the same order, between the same two passes, but for polled().
    What a listener makes of the clock, or of anything else that only its rank sees, must reach no
    plan.
    """

    def arrived(self, req: Req) -> None:
        """A new request has come."""

    def planned(self, plan: Plan, seconds: float) -> None:
        """A pass was planned, which took some seconds; the queue is in its old order."""

    def carried_out(
        self, actions: Sequence[Action], requests: Mapping[Job, Req], left: Sequence[Req]
    ) -> None:
        """These actions of a plan were. left: the requests that found no room after all."""

    def ran(self, batch: Batch) -> None:
        """A batch is about to run."""

    def stepped(self, batch: Batch, result: Any) -> None:
        """A batch's results are in. result: None if its tokens come from a prefill server."""

    def ended(self, req: Req, was_aborted: bool) -> None:
        """A request has finished, or was aborted in the queue. It comes once for each."""

    def switched(
        self, name: str, policy: Policy, limits: Limits, unfinished: Sequence[Req]
    ) -> None:
        """Another policy, or the same with other settings, orders these requests from now on.
        unfinished: by arrival. name: what --schedule-policy would say."""

    def polled(self) -> Any:
        """On the rank that broadcasts, in each turn of its loop: return a message for all ranks, or
        None. It is repeated until it comes back, as SGLang may skip a broadcast."""

    def stats(self) -> dict[str, Any]:
        """Return entries for /server_info."""
        return {}


class Listeners(Listener):
    """Some listeners as one. Each event reaches them in their order."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._listeners = [*listeners]

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._listeners)

    def add(self, listener: Listener) -> None:
        """Put one at the end."""
        self._listeners.append(listener)

    def arrived(self, req: Req) -> None:
        for listener in self._listeners:
            listener.arrived(req)

    def planned(self, plan: Plan, seconds: float) -> None:
        for listener in self._listeners:
            listener.planned(plan, seconds)

    def carried_out(
        self, actions: Sequence[Action], requests: Mapping[Job, Req], left: Sequence[Req]
    ) -> None:
        for listener in self._listeners:
            listener.carried_out(actions, requests, left)

    def ran(self, batch: Batch) -> None:
        for listener in self._listeners:
            listener.ran(batch)

    def stepped(self, batch: Batch, result: Any) -> None:
        for listener in self._listeners:
            listener.stepped(batch, result)

    def ended(self, req: Req, was_aborted: bool) -> None:
        for listener in self._listeners:
            listener.ended(req, was_aborted)

    def switched(
        self, name: str, policy: Policy, limits: Limits, unfinished: Sequence[Req]
    ) -> None:
        for listener in self._listeners:
            listener.switched(name, policy, limits, unfinished)

    def polled(self) -> list[Any]:
        """All messages."""
        messages = [listener.polled() for listener in self._listeners]
        return [message for message in messages if message is not None]

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for listener in self._listeners:
            found |= listener.stats()
        return found
