"""The events of a scheduler, and the listeners that receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from patches.engine_types import Batch, Req


class Listener:
    """Receives the events of one scheduler. By default a method does nothing.

    All ranks get the same events in the same order, between the same two passes, except for
    polled(). Values that only one rank sees, such as its clock, must not influence a plan.
    """

    def arrived(self, req: Req) -> None:
        """A new request has arrived."""

    def ran(self, batch: Batch) -> None:
        """A batch is about to run."""

    def stepped(self, batch: Batch, result: Any) -> None:
        """A batch's results have arrived. result: None if its tokens come from a prefill server."""

    def ended(self, req: Req, was_aborted: bool) -> None:
        """A request has finished, or was aborted in the queue. Each request ends once."""

    def switched(self, name: str, unfinished: Sequence[Req]) -> None:
        """Another policy, or the same with other settings, orders requests from now on.

        name: the name for --schedule-policy.
        unfinished: all unfinished requests, by arrival.
        """

    def polled(self) -> Any:
        """Return a message for all ranks, or None. The broadcasting rank calls this in each turn
        of its loop. Repeat a message until it arrives here too, because SGLang may skip a
        broadcast."""

    def stats(self) -> dict[str, Any]:
        """Return entries for /server_info."""
        return {}


_Event = TypeVar("_Event", bound=Callable[..., None])


def _to_all(event: _Event) -> _Event:
    @wraps(event)
    def tell(self: Listeners, *args: Any) -> None:
        for hear in self.of(event):
            hear(*args)

    return cast(_Event, tell)


class Listeners(list[Listener], Listener):
    """Several listeners as one. Each event reaches them in list order."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        super().__init__(listeners)
        self._of: dict[str, list[Callable[..., Any]]] = {}

    def append(self, listener: Listener) -> None:
        super().append(listener)
        self._of.clear()

    def of(self, event: Callable[..., Any]) -> list[Callable[..., Any]]:
        """Return the methods of the listeners that do not ignore an event."""
        if (name := event.__name__) not in self._of:
            hearing = [one for one in self if getattr(type(one), name) is not event]
            self._of[name] = [getattr(one, name) for one in hearing]
        return self._of[name]

    arrived = _to_all(Listener.arrived)
    ran = _to_all(Listener.ran)
    stepped = _to_all(Listener.stepped)
    ended = _to_all(Listener.ended)
    switched = _to_all(Listener.switched)

    def polled(self) -> list[Any]:
        """Return all messages."""
        messages = [poll() for poll in self.of(Listener.polled)]
        return [message for message in messages if message is not None]

    def stats(self) -> dict[str, Any]:
        return {key: value for listener in self for key, value in listener.stats().items()}
